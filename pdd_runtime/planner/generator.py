"""Sessions drawn from a workload's distributions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, repeat
from typing import TYPE_CHECKING, Final

import numpy as np

from pdd_runtime.planner.content import extended, leading, prefix_chain, session_chain
from pdd_runtime.planner.distribution import Distribution
from pdd_runtime.planner.session import Session, Spans, Turn

if TYPE_CHECKING:
    from pdd_runtime.planner.workload import Workload

_BATCH: Final = 1024
_MOST: Final = 1 << 40
"""Tokens of anything: what is drawn beyond is cut."""


class Columns:
    """Endless columns of numbers. Each has a generator of its own: another distribution of answers leaves prompts and
    arrivals as they were, so that what is compared differs in that alone."""

    def __init__(self, seed: int, name: str = "") -> None:
        self._seed = f"{seed}/{name}"

    def rng(self, column: str) -> np.random.RandomState:
        entropy = int.from_bytes(f"{self._seed}/{column}".encode(), "little")
        return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(entropy)))

    def numbers(self, column: str, distribution: Distribution) -> Iterator[float]:
        if distribution.kind == "fixed":
            return repeat(distribution.arguments[0])
        return self._drawn(self.rng(column), distribution)

    def _drawn(self, rng: np.random.RandomState, distribution: Distribution) -> Iterator[float]:
        while True:
            yield from distribution.draw(rng, _BATCH).tolist()

    def tokens(self, column: str, distribution: Distribution) -> Iterator[int]:
        """Whole numbers, at least 1."""
        if distribution.kind == "fixed":
            return repeat(max(1, round(distribution.arguments[0])))
        return self._rounded(self.rng(column), distribution)

    def _rounded(self, rng: np.random.RandomState, distribution: Distribution) -> Iterator[int]:
        while True:
            drawn = np.rint(np.clip(distribution.draw(rng, _BATCH), 1, _MOST))
            yield from drawn.astype(np.int64).tolist()

    def below(self, column: str, limit: int) -> Iterator[int]:
        """Whole numbers from 0 to below `limit`, alike."""
        return repeat(0) if limit == 1 else self._chosen(self.rng(column), limit)

    def _chosen(self, rng: np.random.RandomState, limit: int) -> Iterator[int]:
        while True:
            yield from rng.randint(0, limit, _BATCH).tolist()


def mean_tokens(distribution: Distribution) -> float:
    """What `Columns.tokens` gives on average, to about 0.2 %."""
    if distribution.kind == "fixed":
        return max(1, round(distribution.arguments[0]))
    drawn = distribution.draw(Columns(0).rng("mean"), 1 << 17)
    return float(np.rint(np.clip(drawn, 1, _MOST)).mean())


def generate(workload: Workload, seed: int, name: str = "") -> Iterator[Session]:
    """Endless, in the order of their start. Memory does not grow."""
    columns = Columns(seed, name)
    starts = starts_of(workload, columns, mean_tokens(workload.turns))
    prefixes = columns.below("prefix", workload.prefixes)
    turns = columns.tokens("turns", workload.turns)
    first, hits = columns.tokens("prompt", workload.prompt), columns.numbers("hit", workload.hit)
    outputs = columns.tokens("output", workload.output)
    later = _Later(workload, columns)
    for number, start, prefix, many, length, hit, output in zip(
        count(), starts, prefixes, turns, first, hits, outputs, strict=False
    ):
        asked = first_turn(number, prefix, length, hit, output)
        yield Session(number, start, prefix, (asked,) if many == 1 else tuple(later.turns(number, asked, many)))


def first_turn(number: int, prefix: int, length: int, hit: float, output: int) -> Turn:
    """A session's first turn, of whose prompt the share `hit` is a prefix that sessions share."""
    # One token at least is new: else there would be nothing to compute.
    reused = min(round(length * hit), length - 1)
    own = (session_chain(number, 0), length - reused)
    return Turn(reused, length - reused, output, 0.0, ((prefix_chain(prefix), reused), own) if reused else (own,))


def starts_of(workload: Workload, columns: Columns, requests: float) -> Iterator[float | None]:
    """When sessions of so many requests begin."""
    if workload.rate is None:
        return repeat(None)
    return workload.arrivals.starts(workload.rate / requests, columns.rng("arrivals"))


class _Later:
    """The turns behind a session's first."""

    def __init__(self, workload: Workload, columns: Columns) -> None:
        self._thinks = columns.numbers("think", workload.think)
        self._outputs = columns.tokens("later/output", workload.output)
        self._hits = columns.numbers("later/hit", workload.hit)
        self._grows = workload.new is not None
        self._lengths = columns.tokens("later/prompt", workload.new or workload.prompt)

    def turns(self, number: int, first: Turn, many: int) -> Iterator[Turn]:
        yield first
        turn = first
        for place in range(1, many):
            history, known = extended(turn.spans, turn.output), turn.prompt + turn.output
            length = next(self._lengths)
            reused, fresh = known, length
            if not self._grows:
                reused = min(round(length * next(self._hits)), length - 1, known)
                fresh = length - reused
            spans = _continued(history, known, reused, fresh, session_chain(number, place))
            turn = Turn(reused, fresh, next(self._outputs), max(0.0, next(self._thinks)), spans)
            yield turn


def _continued(history: Spans, known: int, reused: int, fresh: int, chain: int) -> Spans:
    if reused == known:
        return extended(history, fresh)
    return (*leading(history, reused), (chain, fresh))
