"""One simulation of one deployment: whether it keeps its promise at a rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pdd_runtime.planner.search.family import Sizes


class Change(NamedTuple):
    """Something that is different from the plan."""

    link: str = ""
    """A link that is `times` as fast; empty: the hit rate is `times` what it is."""
    times: float = 1.0


class Trial(NamedTuple):
    """What is simulated. The same trial has the same verdict, in every process."""

    family: int
    sizes: Sizes
    rate: float
    """Requests/s."""
    requests: int
    seed: int
    changes: tuple[Change, ...] = ()


class Verdict(NamedTuple):
    """What came out of it."""

    kept: bool
    """The promise was."""
    ttft: Mapping[str, float]
    """p50, p90, p99 in seconds."""
    tpot: Mapping[str, float]
    missed: tuple[str, ...]
    """Which promises were not kept: `ttft` (who is refused is late, too), `tpot`."""
    busy: Mapping[str, float]
    """By pool and link, the share of it that is used: `busy_pools`, `busy_links`."""
    relay_share: float
    """Of the answers' tokens."""
    hits: Mapping[str, float]
    """Share of prompt tokens cached at `prefill` and `main`."""
    sent: Mapping[str, float]
    """Bytes/s over each link."""
    margin: float = 0.0
    """The worst P90 over what was promised: 1 is just kept. 0: not known."""
