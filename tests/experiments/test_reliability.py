"""The commands of bench/reliability.py, short, on real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdd_runtime.testing.etcd_server import find_etcd
from tests.waiting import PATIENCE

BENCH = Path(__file__).resolve().parents[2] / "bench" / "reliability.py"
SHORT = ("--engine", "scripted", "--workload", "prompt=60,output=uniform(20, 40),timeout=60", "--streams", "4")


def bench(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCH), *arguments, *SHORT],
        capture_output=True,
        text=True,
        timeout=8 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(find_etcd() is None, reason="there is no etcd on this machine")
@pytest.mark.timeout(300)
def test_etcd_is_lost_and_comes_back_empty_and_nobody_notices() -> None:
    told = bench("etcd", "--away", "2", "--longest-gap", "30")
    assert "well" in told
    assert "restarts" in told


@pytest.mark.timeout(300)
def test_of_many_requests_and_aborts_nothing_is_left() -> None:
    assert "0 failed" in bench("soak", "--requests", "40", "--aborts", "40")
