"""What one request of a workload asks for on average: the work that no deployment can save."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdd_runtime.planner.context_limit import ContextLimit
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.revenue import prefill_time
from pdd_runtime.planner.session import Turn
from pdd_runtime.planner.workload import Workload

SAMPLE = 2000
"""Requests that means are taken over."""


@dataclass(frozen=True)
class Demand:
    """A sample of requests, as if all that an earlier one had were cached: less work is not possible. Means are over
    all that are sent."""

    turns: Sequence[Turn]
    refused: int = 0
    """Those sent beside them that are too long, and no work."""

    @staticmethod
    def of(workload: Workload, seed: int = 0) -> Demand:
        turns = [turn for session in workload.sessions(SAMPLE, seed) for turn in session.turns]
        return Demand(tuple(turns))

    def within(self, limit: ContextLimit | None) -> Demand:
        """What is left of it where longer requests are refused."""
        if limit is None:
            return self
        turns = tuple(turn for turn in self.turns if limit.holds(turn.prompt, turn.output))
        return Demand(turns, self.sent - len(turns))

    @property
    def sent(self) -> int:
        """Requests of the sample."""
        return len(self.turns) + self.refused

    @property
    def too_long(self) -> float:
        """Share of them that is refused."""
        return self.refused / self.sent

    @property
    def output(self) -> float:
        """Tokens of an answer."""
        return sum(turn.output for turn in self.turns) / self.sent

    @property
    def prompt(self) -> float:
        return sum(turn.prompt for turn in self.turns) / self.sent

    @property
    def hit(self) -> float:
        """Share of all prompt tokens that an earlier request had."""
        return sum(turn.reused for turn in self.turns) / sum(turn.prompt for turn in self.turns)

    @property
    def context(self) -> float:
        """Tokens of the sequence that an answer's average token stands behind."""
        tokens = sum(turn.output * (turn.prompt + turn.output / 2) for turn in self.turns)
        return tokens / sum(turn.output for turn in self.turns)

    def prefill(self, pool: PoolModel) -> float:
        """Seconds of one of its workers."""
        return sum(prefill_time(pool, turn.fresh, turn.reused) for turn in self.turns) / self.sent

    def bytes(self, pool: PoolModel) -> float:
        """Of KV that main lacks at least: that of the new tokens."""
        return sum(pool.kv_token * turn.fresh for turn in self.turns) / self.sent


def decode_rate(pool: PoolModel, context: float, tpot: float | None) -> float:
    """Tokens/s that one worker makes at most: with the largest batch that its slots and its memory allow, and whose
    steps are within `tpot`. 0: not even one request's are."""
    most = min(pool.batch_limit, math.floor(pool.capacity / max(1.0, context)))
    if most < 1:
        return 0.0
    if tpot is not None and pool.latency.decode(most, context) > tpot:
        low, high = 0, most
        while high - low > 1:
            batch = (low + high) // 2
            if pool.latency.decode(batch, context) <= tpot:
                low = batch
            else:
                high = batch
        most = low
    return most / pool.latency.decode(most, context) if most else 0.0
