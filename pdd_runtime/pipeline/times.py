"""How long things take in each pool. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pdd_runtime.plugins.engine import Load


class Times(NamedTuple):
    """As in `WorkerView`."""

    token: float | None = None
    request: float | None = None


def times_of(loads: Iterable[tuple[str, str, Load]]) -> dict[str, Times]:
    """By pool, from what its workers measure: each with its pool, its role and its load. The workers of a pool are
    alike, so they are taken together: one that has just started is neither shunned nor swamped, and chance does not
    make one of them look slow. A pool that has measured nothing is taken to be like the others of its role."""
    pools: dict[str, list[Load]] = {}
    roles: dict[str, list[Load]] = {}
    role_of = {}
    for pool, role, load in loads:
        pools.setdefault(pool, []).append(load)
        roles.setdefault(role, []).append(load)
        role_of[pool] = role
    alike = {role: _mean(found) for role, found in roles.items()}
    return {pool: _or(_mean(found), alike[role_of[pool]]) for pool, found in pools.items()}


def _mean(loads: Sequence[Load]) -> Times:
    tokens = [load.token_time for load in loads if load.token_time is not None]
    requests = [load.request_time for load in loads if load.request_time is not None]
    return Times(
        sum(tokens) / len(tokens) if tokens else None,
        sum(requests) / len(requests) if requests else None,
    )


def _or(times: Times, other: Times) -> Times:
    return Times(
        other.token if times.token is None else times.token,
        other.request if times.request is None else times.request,
    )
