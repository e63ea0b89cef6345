"""The two tables of a pool: passes over new tokens, and decode steps."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from pdd_runtime.errors import PddError
from pdd_runtime.experiments.probe import Computed, Probe
from pdd_runtime.planner.latency import Grid

_ROWS = (1, 8, 32, 128, 512, 2048, 8192)
"""New tokens of a pass."""
_COLUMNS = (0, 256, 1024, 4096, 16_384, 65_536)
"""Tokens before them."""
_FIRST = 32
"""Tokens of the shortest prompts that are decoded behind."""
_STEPS = 16
_TRIES = 8
"""A few tokens drawn by chance may be known."""
_ROOM = 0.8
"""Share of a pool's KV that is used at once."""


@dataclass(frozen=True)
class Extent:
    """How far a measurement goes."""

    longest: int = 4096
    """Tokens of a prompt."""
    batch: int = 16
    """Requests decoded at once."""
    repeats: int = 3
    """Of each pass: the median counts."""
    filling: float = 15.0
    """Seconds that the prompts of a batch may take to be computed; larger batches of longer ones are worked out."""


class PoolTimes:
    """Of one pool, by one of its workers."""

    def __init__(self, probe: Probe, extent: Extent, told: Callable[[str], None]) -> None:
        """`told` hears what is measured next."""
        self._probe, self._extent, self._told = probe, extent, told
        self.longest = max(
            1, min(extent.longest, int(probe.capacity * _ROOM / 2), probe.info.context_length - _STEPS - 1)
        )
        self.chunk = 1
        self.rate = 1.0
        """Tokens of a long prompt computed in a second."""

    async def passes(self) -> Grid:
        """Seconds by new tokens and tokens before them. Raises what the worker raises, and `ProfileError`."""
        probe = self._probe
        self._told(f"a prompt of {self.longest} tokens")
        await probe.compute(probe.draw(1))
        base = probe.draw(self.longest)
        whole = await probe.compute(base)
        self.chunk = min(whole.chunk, self.longest)
        self.rate = whole.new / max(1e-6, whole.seconds)
        rows = [*(count for count in _ROWS if count < self.chunk), self.chunk]
        last = self.longest // probe.block * probe.block
        columns = sorted({0, *(count // probe.block * probe.block for count in _COLUMNS if count < last), last})
        cells: dict[tuple[int, int], float] = {}
        # From the longest, which is the first that would be forgotten where there is little room.
        for context in reversed(columns):
            for new in rows:
                if context + new < probe.info.context_length and (new <= rows[0] or context + new <= 2 * self.longest):
                    self._told(f"a pass over {new} tokens behind {context}")
                    cells[new, context] = await self._pass(base[:context], new)
        return _grid(rows, columns, cells)

    async def steps(self) -> Grid:
        """Seconds by sequences and tokens of each; after `passes`. Raises what the worker raises."""
        probe, room = self._probe, int(self._probe.capacity * _ROOM)
        limit = min(self._extent.batch, probe.info.batch_limit, max(1, room // (_FIRST + _STEPS)))
        rows = sorted({*(2**power for power in range(limit.bit_length())), limit})
        rows = [row for row in rows if row <= limit]
        columns = sorted({min(_FIRST, self.longest), *(count for count in _COLUMNS if count > _FIRST), self.longest})
        columns = [column for column in columns if column <= self.longest]
        cells: dict[tuple[int, int], float] = {}
        for context in columns:
            prompts: list[list[int]] = []
            for batch in rows:
                filling = context * batch / self.rate
                fits = context == columns[0] or filling <= self._extent.filling
                if batch > 1 and (not fits or batch * (context + _STEPS) > room):
                    break
                self._told(f"steps of {batch} sequences of {context} tokens")
                for _ in range(batch - len(prompts)):
                    prompts.append(probe.draw(context))
                    await probe.compute(prompts[-1])
                cells[batch, context + _STEPS // 2] = await probe.steps(prompts, _STEPS)
        return _grid(rows, [context + _STEPS // 2 for context in columns], cells)

    async def _pass(self, known: list[int], new: int) -> float:
        """The median over the repeats."""
        times = []
        for _ in range(self._extent.repeats):
            times.append((await self._once(known, new)).seconds)
        return statistics.median(times)

    async def _once(self, known: list[int], new: int) -> Computed:
        for _ in range(_TRIES):
            done = await self._probe.compute(known + self._probe.draw(new))
            if done.cached == len(known):
                return done
            if done.cached < len(known):
                # It was forgotten meanwhile.
                await self._probe.compute(known)
        raise PddError(
            f"a prompt of {len(known)} tokens does not stay cached",
            where=f"pool {self._probe.pool}",
            why=f"of the same prompt, asked again at once, {done.cached} tokens were known",
            fix="give the pool more blocks, or measure shorter prompts: --longest",
        )


def _grid(rows: list[int], columns: list[int], cells: dict[tuple[int, int], float]) -> Grid:
    seconds = [
        [None if (cell := cells.get((row, column))) is None else round(cell, 7) for column in columns] for row in rows
    ]
    return Grid(tokens=rows, context=columns, seconds=seconds)
