"""Pages as vLLM's own operation packs them, in every number format and packing that this host's CPU has."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pdd_connector
import pytest
from pdd_vllm import testing


@pytest.mark.timeout(1000)
def test_what_vllm_writes_into_a_page_is_in_the_block_bit_by_bit_and_goes_back_as_it_was() -> None:
    python = testing.interpreter()
    here = Path(pdd_connector.__file__).parents[1]
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("pages_of_vllm.py"))],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(here)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(cases) == 12
    assert all(case["exact"] for case in cases), cases
