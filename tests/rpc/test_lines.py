from __future__ import annotations

from typing import Any

import pytest

from pdd_runtime.clock import now
from pdd_runtime.errors import RequestError, RpcError
from pdd_runtime.graph.models import Graph
from pdd_runtime.observe import Vitals, serve_vitals
from pdd_runtime.plugins.lines import Lines
from pdd_runtime.plugins.messages import Empty, LineCut
from pdd_runtime.rpc import RpcServer
from tests.rpc.conftest import Dial
from tests.waiting import PATIENCE


def graph(**links: dict[str, Any]) -> Graph:
    return Graph.model_validate(
        {
            "apiVersion": "pdd/v1alpha1",
            "kind": "InferenceGraph",
            "metadata": {"name": "g"},
            "spec": {
                "model": {"source": "m"},
                "clusters": {"dc-a": {}, "dc-b": {}, "dc-c": {}},
                "links": links,
                "pools": {"all": {"role": "aggregated", "cluster": "dc-a", "engine": {"plugin": "e"}}},
            },
        }
    )


WAN = {"between": ["dc-a", "dc-b"], "bandwidth": "200Mbit/s", "rtt": "50ms", "jitter": "4ms", "emulate": True}


def test_an_emulated_link_gives_a_line_with_half_its_round_trip_in_each_direction() -> None:
    for here, there in (("dc-a", "dc-b"), ("dc-b", "dc-a")):
        line = Lines(graph(wan=WAN), here).to(there)
        assert line is not None
        assert [line.bandwidth, line.delay, line.jitter] == pytest.approx([200e6, 0.025, 0.002])


def test_all_senders_of_a_process_share_one_line() -> None:
    lines = Lines(graph(wan=WAN), "dc-a")
    assert lines.to("dc-b") is lines.to("dc-b")


def test_without_an_emulated_link_the_network_is_as_it_is() -> None:
    lines = Lines(graph(wan=WAN, real=WAN | {"between": ["dc-a", "dc-c"], "emulate": False}), "dc-a")
    assert lines.to("dc-c") is None
    assert lines.to("dc-a") is None
    assert lines.to("elsewhere") is None


async def test_who_has_the_secret_can_cut_an_emulated_line(dial: Dial, server: RpcServer) -> None:
    lines = Lines(graph(wan=WAN), "dc-a")
    lines.serve(server)
    connection = await dial()
    begun = now()
    await connection.call("line.cut", LineCut("dc-b", 500.0), type(None), timeout=PATIENCE)
    line = lines.to("dc-b")
    assert line is not None
    assert line.reserve(1, begun)[0] >= begun + 500.0
    for wrong in (LineCut("dc-c", 1.0), LineCut("dc-b", 601.0), LineCut("dc-b", 0.0), LineCut("dc-b", float("nan"))):
        with pytest.raises(RequestError, match="cannot be cut"):
            await connection.call("line.cut", wrong, type(None), timeout=PATIENCE)


async def test_a_real_line_cannot_be_cut(dial: Dial, server: RpcServer) -> None:
    Lines(graph(wan=WAN | {"emulate": False}), "dc-a").serve(server)
    with pytest.raises(RpcError, match=r"line\.cut"):
        await (await dial()).call("line.cut", LineCut("dc-b", 1.0), type(None), timeout=PATIENCE)


async def test_a_process_tells_what_it_holds(
    dial: Dial, server: RpcServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    serve_vitals(server)
    connection = await dial()

    async def ask() -> Vitals:
        return await connection.call("process.vitals", Empty(), Vitals, timeout=PATIENCE)

    before = await ask()
    with (tmp_path_factory.mktemp("files") / "one").open("w"):
        assert (await ask()).files == before.files + 1
    after = await ask()
    assert after.files == before.files
    assert after.tasks == before.tasks > 0
    assert after.memory > 1 << 20
