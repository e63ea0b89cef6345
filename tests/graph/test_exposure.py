from __future__ import annotations

from pathlib import Path

import pytest

from pdd_runtime.errors import GraphError
from pdd_runtime.graph import load
from pdd_runtime.graph.models import Cluster

GRAPH = Path(__file__).parents[2] / "graphs" / "quickstart.yaml"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", '"::1"', "localhost"])
def test_what_stays_on_the_host_needs_no_word(host: str) -> None:
    load(GRAPH, [f"spec.clusters.dc-b.host={host}"])


@pytest.mark.parametrize("host", ["10.0.0.7", "0.0.0.0", '"::"', '"2001:db8::1"', "b.example"])
def test_what_leaves_the_host_in_clear_is_called_insecure_by_the_graph(host: str) -> None:
    with pytest.raises(GraphError, match="beyond this host, without encryption"):
        load(GRAPH, [f"spec.clusters.dc-b.host={host}"])
    load(GRAPH, [f"spec.clusters.dc-b={{host: {host}, insecure: true, advertise: b.example}}"])


def test_with_tls_it_may_leave_the_host() -> None:
    tls = "spec.security.tls={ca: ca.pem, cert: '{cluster}.pem', key: /etc/pdd/key}"
    graph = load(GRAPH, [tls, "spec.clusters.dc-b.host=10.0.0.7"]).graph
    files = graph.spec.security.tls
    assert files is not None
    assert (files.ca, files.key) == (str(GRAPH.parent / "ca.pem"), "/etc/pdd/key")


@pytest.mark.parametrize("cluster", ["{host: 0.0.0.0", "{host: '::'", "{host: 10.0.0.7, advertise: 0.0.0.0"])
def test_every_address_of_a_host_is_none_to_be_reached_at(cluster: str) -> None:
    with pytest.raises(GraphError, match="cannot be reached at"):
        load(GRAPH, [f"spec.clusters.dc-b={cluster}, insecure: true}}"])


@pytest.mark.parametrize(
    ("cluster", "endpoint", "reached"),
    [
        (Cluster(), "127.0.0.1:80", "127.0.0.1:80"),
        (Cluster(host="0.0.0.0", advertise="b.example"), "0.0.0.0:80", "b.example:80"),
        (Cluster(host="::", advertise="2001:db8::1"), "[::]:80", "[2001:db8::1]:80"),
        (Cluster(host="0.0.0.0", advertise="b"), "rdma=0.0.0.0:1,tcp=0.0.0.0:2", "rdma=b:1,tcp=b:2"),
    ],
)
def test_an_endpoint_is_written_as_others_reach_it(cluster: Cluster, endpoint: str, reached: str) -> None:
    assert cluster.reached(endpoint) == reached
