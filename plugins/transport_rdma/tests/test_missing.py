"""Where NIXL or a device is missing: words that help, or the fallback that the graph names."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable

import pytest
from pdd_rdma.config import RdmaConfig
from pdd_rdma.transport import RdmaTransport

from pdd_runtime.errors import PluginError, TransferError
from pdd_runtime.testing.kv_parties import Context, StoreSink, StoreSource, sequence, subscription

Party = Callable[..., RdmaTransport]
HOST = "127.0.0.1"
LACKING = {"tls": "", "devices": ["none_0"]}
WITHOUT_NIXL = """
import sys
from importlib.abc import MetaPathFinder

class NotInstalled(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("nixl"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
from pdd_runtime.errors import PluginError
from pdd_runtime.plugins import load_plugins
from pdd_runtime.testing.kv_parties import Context

manager = load_plugins()
cls = manager.transport("rdma")
try:
    cls(manager.configure(cls, {"tls": "all"}, "here"), Context("dc-a"))
except PluginError as error:
    print(error)
"""
ONE_AGENT = """
import sys
from pdd_rdma.config import RdmaConfig
from pdd_rdma.library import load

agent = load(RdmaConfig(tls="all"))("alone")
if sys.argv[1] == "given back":
    del agent
"""


@pytest.mark.parametrize("agent", ["given back", "left"])
def test_a_process_that_has_had_an_agent_ends_in_order(agent: str) -> None:
    done = subprocess.run([sys.executable, "-c", ONE_AGENT, agent], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_nixl_the_plugin_is_listed_and_says_what_to_install() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_NIXL], capture_output=True, text=True, check=True)
    assert "transport rdma needs NIXL" in done.stdout
    assert "neither nixl_cu13 nor nixl_cu12 is installed" in done.stdout
    assert "pip install --no-deps nixl-cu12==1.5.1" in done.stdout


def test_without_a_device_nothing_slow_is_used_in_silence() -> None:
    with pytest.raises(PluginError, match="there is no RDMA device none_0") as missing:
        RdmaTransport(RdmaConfig.model_validate(LACKING), Context("dc-a"))
    assert "/sys/class/infiniband has" in missing.value.why
    assert "fallback: tcp" in missing.value.fix


async def test_a_setting_that_ucx_does_not_know_is_told(party: Party) -> None:
    source = StoreSource()
    with pytest.raises(TransferError, match="NIXL cannot be used"):
        await party("dc-a", source.store, tls="nosuch").serve(source, HOST)
    wanted = sequence(1)
    async with asyncio.timeout(20):
        endpoint = await party("dc-a", source.store).serve(source, HOST)
        with pytest.raises(TransferError, match="did not come") as failed:
            await party("dc-b", tls="nosuch").fetch(endpoint, subscription(wanted, deadline=1.0), StoreSink(wanted))
    assert "NIXL" in failed.value.why


@pytest.mark.parametrize(
    ("here", "there"),
    [({}, LACKING), (LACKING, {}), (LACKING, LACKING)],
    ids=["the sender has no device", "the receiver has none", "neither has"],
)
async def test_the_fallback_brings_the_blocks_and_says_so(
    party: Party, caplog: pytest.LogCaptureFixture, here: dict[str, object], there: dict[str, object]
) -> None:
    source, wanted = StoreSource(), sequence(8)
    source.make(wanted)
    with caplog.at_level(logging.INFO, "pdd_rdma"):
        endpoint = await party("dc-a", source.store, fallback="tcp", **there).serve(source, HOST)
        sink = StoreSink(wanted)
        report = await party("dc-b", fallback="tcp", **here).fetch(endpoint, subscription(wanted), sink)
    assert sink.whole
    assert report.over == "tcp"
    assert "KV goes over transport tcp instead of rdma: there is no RDMA device none_0" in caplog.text
    assert "request req-1: KV comes over transport tcp, not rdma" in caplog.text


async def test_with_devices_on_both_sides_the_fallback_is_not_used(party: Party) -> None:
    source, wanted = StoreSource(), sequence(8)
    source.make(wanted)
    endpoint = await party("dc-a", source.store, fallback="tcp").serve(source, HOST)
    sink = StoreSink(wanted)
    assert (await party("dc-b", fallback="tcp").fetch(endpoint, subscription(wanted), sink)).over == ""
    plain = StoreSink(wanted)
    assert (await party("dc-b").fetch(endpoint, subscription(wanted), plain)).over == ""
    assert sink.whole
    assert plain.whole


async def test_without_a_fallback_here_there_is_an_error(party: Party) -> None:
    source, wanted = StoreSource(), sequence(2)
    endpoint = await party("dc-a", source.store, fallback="tcp", **LACKING).serve(source, HOST)
    with pytest.raises(TransferError, match="nothing joins this worker") as refused:
        await party("dc-b").fetch(endpoint, subscription(wanted), StoreSink(wanted))
    assert "here: rdma; there: tcp" in refused.value.why
