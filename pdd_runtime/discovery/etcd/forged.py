"""What stands in etcd and no process of the graph has written: whoever may write there may write anything."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from pdd_runtime.plugins.discovery import GraphMark, Member

MEMBER_LIMIT, GRAPH_LIMIT = 64 << 10, 1 << 20
"""Bytes of a value."""
AHEAD = 86400.0
"""Seconds that a clock of the graph may be ahead of ours."""
_TEXT = 512
"""Characters of a name or an address."""

T = TypeVar("T")


def decoded(value: bytes, kind: type[T], limit: int) -> T:
    """Raises `ValueError` for what is none."""
    if len(value) > limit:
        raise ValueError(f"it has {len(value)} bytes, and {limit} are allowed")
    try:
        return msgspec.json.decode(value, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error


def fault(member: Member, born: float, graph: GraphMark) -> str:
    """Why it cannot be a process of this very graph; empty where it can."""
    texts = (member.endpoint, member.plane, member.key.epoch, *member.transports, *member.transports.values())
    if longest := max((len(text) for text in texts if len(text) > _TEXT), default=0):
        return f"a name of {longest} characters"
    if not born < time.time() + AHEAD:
        return "it began in a time to come"
    expected = _expected(member.key.pool, graph.shared)
    if expected is not None and (member.role, member.cluster) not in expected:
        there = " or ".join(" in ".join(place) for place in expected)
        return f"it is {member.role} in {member.cluster}, and the graph has {there or 'no such pool'}"
    return ""


def _expected(pool: str, shared: Mapping[str, Any]) -> list[tuple[str, str]] | None:
    """Role and cluster of a pool, for each place that it may have; empty: there is none of that name, None: nothing is
    known."""
    if "pools" not in shared:
        return None
    if pool == "frontend":
        there = shared["frontend"]["cluster"]
        return [("frontend", str(cluster)) for cluster in (there if isinstance(there, list) else [there])]
    known = shared["pools"].get(pool)
    return [] if known is None else [(str(known["role"]), str(known["cluster"]))]
