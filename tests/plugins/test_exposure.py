from __future__ import annotations

from pathlib import Path

import pytest

from pdd_runtime.graph import load
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.preflight import preflight

GRAPHS = Path(__file__).parents[2] / "graphs"
OPEN = {"vllm-nixl.yaml": ("nixl_host", "its KV"), "sglang-pd.yaml": ("transfer_host", "its KV and its API")}


@pytest.mark.parametrize("graph", OPEN)
def test_an_engines_own_transfer_leaves_the_host_only_where_the_cluster_is_insecure(graph: str) -> None:
    setting, what = OPEN[graph]
    plugins = load_plugins()
    path = f"spec.pools.prefill.engine.config.{setting}"
    cluster = load(GRAPHS / graph).graph.spec.pools["prefill"].cluster
    faults = preflight(load(GRAPHS / graph, [f"{path}=10.0.0.5"]), plugins)
    assert [fault.what for fault in faults] == [f'pool "prefill" opens {what} to 10.0.0.5, beyond this host']
    assert faults[0].where == f"--set {path}=10.0.0.5"
    assert f'insecure: true beside cluster "{cluster}"' in faults[0].fix
    assert preflight(load(GRAPHS / graph, [f"{path}=127.0.0.1"]), plugins) == []
    insecure = f"spec.clusters.{cluster}.insecure=true"
    assert preflight(load(GRAPHS / graph, [f"{path}=10.0.0.5", insecure]), plugins) == []
