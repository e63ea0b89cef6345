"""Deployments, and what they are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdd_runtime.planner.search.family import Sizes


class Candidate(NamedTuple):
    """A deployment: a family, and how many workers each of its pools has."""

    family: int
    sizes: Sizes


@dataclass(frozen=True)
class Point:
    """A deployment that keeps its promise up to a rate."""

    candidate: Candidate
    goodput: float
    """Requests/s."""
    cost: float
    """An hour of it, at the middle of prices."""

    @property
    def bcr(self) -> float:
        return self.goodput / self.cost


def front(points: Sequence[Point]) -> tuple[Point, ...]:
    """Those that no other beats in cost and goodput at once, by cost."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda each: (each.cost, -each.goodput, each.candidate)):
        if not kept or point.goodput > kept[-1].goodput:
            kept.append(point)
    return tuple(kept)
