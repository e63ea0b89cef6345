from __future__ import annotations

from pathlib import Path

import pytest

from pdd_runtime.discovery import LocalDiscovery
from pdd_runtime.graph import load
from pdd_runtime.plugins import PluginManager, load_plugins
from pdd_runtime.plugins.preflight import preflight

VLLM = Path(__file__).parents[2] / "graphs" / "vllm.yaml"
"""Prefill and relay in one cluster, main in another."""
ALONE = "one process alone can listen on a port of a host"


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return load_plugins()


def port(pool: str, number: int) -> str:
    return f"spec.pools.{pool}.engine.config.port={number}"


def faults(plugins: PluginManager, *overrides: str) -> list[str]:
    found = preflight(load(VLLM, overrides), plugins)
    assert all("leave port out, so that each takes a free one" in fault.fix for fault in found)
    return [f"{fault.where}: {fault.what}: {fault.why}" for fault in found]


def test_workers_of_one_pool_cannot_share_a_port(plugins: PluginManager) -> None:
    assert faults(plugins, port("main", 9001), "spec.pools.main.replicas=2") == [
        f'--set {port("main", 9001)}: pool "main" cannot have port 9001: it has 2 workers, and {ALONE}'
    ]
    assert faults(plugins, port("main", 9001)) == []
    assert faults(plugins, port("main", 0), "spec.pools.main.replicas=2") == []


@pytest.mark.parametrize("other", ["relay", "main"])
def test_pools_of_a_host_cannot_share_a_port(plugins: PluginManager, other: str) -> None:
    assert faults(plugins, port("prefill", 9001), port(other, 9001)) == [
        f'--set {port(other, 9001)}: pool "{other}" cannot have port 9001: pool "prefill" listens there as well, '
        f"and {ALONE}"
    ]
    assert faults(plugins, port("prefill", 9001), port(other, 9002)) == []


def test_clusters_with_launchers_of_their_own_each_have_all_ports(
    plugins: PluginManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalDiscovery, "across_hosts", True)
    assert faults(plugins, port("prefill", 9001), port("main", 9001)) == []
    assert len(faults(plugins, port("prefill", 9001), port("relay", 9001))) == 1
    assert faults(plugins, "spec.frontend.port=9001", port("main", 9001)) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "localhost"])
def test_a_server_cannot_have_the_frontends_port(plugins: PluginManager, host: str) -> None:
    frontend = (f"spec.frontend.host='{host}'", "spec.frontend.port=9001", "spec.frontend.insecure=true")
    assert faults(plugins, *frontend, port("main", 9001)) == [
        f'--set {port("main", 9001)}: pool "main" cannot have port 9001: the frontend listens there as well, '
        f"and {ALONE}"
    ]


def test_a_frontend_at_another_address_is_in_nobodys_way(plugins: PluginManager) -> None:
    for frontend in ("host=192.0.2.7", "host=front.example.org"):
        away = (f"spec.frontend.{frontend}", "spec.frontend.insecure=true")
        assert faults(plugins, *away, "spec.frontend.port=9001", port("main", 9001)) == []
