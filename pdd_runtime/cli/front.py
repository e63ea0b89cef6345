"""How the commands reach the frontend of a running graph."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

import httpx

from pdd_runtime.errors import LaunchError
from pdd_runtime.frontend.keys import operator_key
from pdd_runtime.launch import GraphState, GraphStatus, ps, trusted

_CONNECT = 5.0
_NEXT = 120.0
"""Seconds to wait for the next piece of an answer."""


@dataclass(frozen=True)
class Front:
    """Where it answers, and what it wants to see."""

    url: str
    admin: str
    """Where it answers operators."""
    key: str = field(default="", repr=False)
    """The graph's own; empty: it has no API keys."""
    verify: ssl.SSLContext | bool = True

    def client(self, *, admin: bool = False) -> httpx.AsyncClient:
        """`admin`: of the operators' port."""
        # The frontend is on this host, or where the graph says: never behind the environment's proxy.
        return httpx.AsyncClient(
            base_url=self.admin if admin else self.url,
            headers={"authorization": f"Bearer {self.key}"} if self.key else {},
            timeout=httpx.Timeout(_NEXT, connect=_CONNECT),
            trust_env=False,
            verify=self.verify,
        )


async def front_of(state: GraphState) -> Front:
    """Of a running graph. Raises `LaunchError` where its frontend is not up."""
    return front_at(state, await ps(state))


def front_at(state: GraphState, status: GraphStatus) -> Front:
    """The same, of a graph whose status is known."""
    if not status.url:
        why = status.why_not_ready or "it is in another cluster's part of the graph"
        raise LaunchError(f"the frontend of {state.name} is not up", why=why)
    graph, launcher = state.read_graph(), state.launcher()
    key = ""
    if graph is not None and graph.spec.frontend.keys is not None and launcher is not None:
        key = operator_key(launcher.secret)
    return Front(status.url, status.admin or status.url, key, True if graph is None else trusted(graph))
