"""Whether what workers and the frontend listen on leaves the host, and may."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from pdd_runtime.errors import GraphError
from pdd_runtime.graph.document import Route
from pdd_runtime.graph.scene import Scene


def check_exposure(scene: Scene) -> Iterator[GraphError]:
    """Without TLS the message plane and the transports are in clear; the graph's secret is said on them."""
    for name, cluster in scene.spec.clusters.items():
        route: Route = ("spec", "clusters", name)
        if not leaves_host(cluster.host):
            continue
        if not cluster.insecure and scene.spec.security.tls is None:
            yield scene.error(
                (*route, "host"),
                f'workers of cluster "{name}" listen on {cluster.host}, beyond this host, without encryption',
                why="whoever can read that network reads tokens, KV and the secret that lets a process join",
                fix="give the graph certificates (`pdd-runtime certs init`, spec.security.tls); in a network of your "
                "own (a VPN, WireGuard) write insecure: true beside it; else leave host out",
            )
        if _is_any(cluster.advertise or cluster.host):
            yield scene.error(
                (*route, "advertise" if cluster.advertise else "host"),
                f'workers of cluster "{name}" cannot be reached at {cluster.advertise or cluster.host}',
                why="it stands for every address of a host, and is none",
                fix="write advertise: the address or name at which other clusters reach this one",
            )


def check_doors(scene: Scene) -> Iterator[GraphError]:
    """The HTTP API takes requests from whoever reaches it, unless the graph has API keys."""
    frontend = scene.spec.frontend
    if frontend.keys is not None or frontend.insecure:
        return
    route: Route = ("spec", "frontend")
    doors: list[tuple[Route, str, str]] = [((*route, "host"), frontend.host, "asks the model")]
    if frontend.admin is not None:
        doors.append(((*route, "admin", "host"), frontend.admin.host, "reads timelines and cancels requests"))
    for place, host, does in doors:
        if leaves_host(host):
            yield scene.error(
                place,
                f"the frontend listens on {host}, beyond this host, without API keys",
                why=f"whoever reaches it {does}",
                fix="make keys (`pdd-runtime keys add NAME`) and name their file in spec.frontend.keys; behind a "
                "gateway that asks for them, or in a network of your own, write insecure: true below spec.frontend",
            )


def leaves_host(host: str) -> bool:
    """Whether others than this host reach what listens there."""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
