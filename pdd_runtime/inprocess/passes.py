"""The forward passes of an engine: planned, computed in the model's thread and accounted for, one after another."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from concurrent.futures import Executor
from contextlib import suppress

from pdd_runtime.clock import now
from pdd_runtime.errors import CapacityError, EngineError, PddError
from pdd_runtime.inprocess.runner import Runner
from pdd_runtime.inprocess.sampler import Sampler
from pdd_runtime.inprocess.sampling import Logits
from pdd_runtime.inprocess.scheduler import Planned, Scheduler
from pdd_runtime.inprocess.sequence import Sequence
from pdd_runtime.plugins.engine import Token

log = logging.getLogger(__name__)

FAILURES = 3
"""Passes in a row of which nothing came, after which no more are tried."""
_RETRY = 0.05
"""Seconds after which a sequence that waits for blocks looks again: others may release some without telling us."""

Results = list[Token | PddError | None]


class Passes:
    """On the event loop, but for the computing. A pass that fails is taken apart: each of its sequences is computed
    alone, and only who fails by itself ends with it."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, thread: Executor, *, step_timeout: float, kv_wait: float
    ) -> None:
        """`thread`: where the runner was made. `step_timeout`: seconds that a pass may take. `kv_wait`: seconds that a
        sequence waits for blocks while nobody computes."""
        self._runner, self._scheduler, self._thread = runner, scheduler, thread
        self.step_timeout, self._kv_wait = step_timeout, kv_wait
        self._work = asyncio.Event()
        self._stopped = False
        self._began: float | None = None
        """Of the pass under way."""
        self._ended = now()
        """Of the last one that succeeded."""
        self._failures = 0
        self._ident = 0
        """Of the thread."""

    @property
    def seconds(self) -> float:
        """How long the pass under way takes so far; 0 between two."""
        return 0.0 if self._began is None else now() - self._began

    def wake(self) -> None:
        """There may be something to plan."""
        self._work.set()

    def stop(self) -> None:
        """None begins after this."""
        self._stopped = True
        self._work.set()

    async def run(self) -> None:
        """Until stopped. Raises `EngineError` where nothing more can be computed: passes fail, or one does not end,
        which then still writes into its sequences' blocks."""
        try:
            await self._run()
        except _HungError:
            raise self._hung() from None

    async def _run(self) -> None:
        while not self._stopped:
            self._work.clear()
            planned, forgotten = self._scheduler.plan(), self._scheduler.forgotten()
            if not planned:
                await self._idle(forgotten)
                continue
            try:
                results = await self._compute(planned, forgotten)
                self._failures, self._ended = 0, now()
            except _HungError:
                raise
            except Exception as error:
                log.exception("a forward pass failed")
                results = await self._taken_apart(planned, error)
            self._scheduler.finish(planned, results)
            if self._failures >= FAILURES:
                raise EngineError(f"{FAILURES} forward passes in a row have failed", why=_told(results))

    async def _compute(self, planned: Planned, forgotten: list[int]) -> Results:
        self._began = now()
        computing = asyncio.get_running_loop().run_in_executor(self._thread, self._pass, planned, forgotten)
        for _ in range(2):  # no single timer decides: this process may have been stopped meanwhile
            await asyncio.wait({computing}, timeout=self.step_timeout / 2)
        if not computing.done():
            raise _HungError
        self._began = None
        return computing.result()

    def _pass(self, planned: Planned, forgotten: list[int]) -> Results:
        """In the model's thread: for each chunk the token behind it, where one is wanted, or why none can be chosen."""
        self._ident = threading.get_ident()
        if forgotten:
            self._runner.forget(forgotten)
        rows = self._runner.step([chunk for _, chunk in planned]) if planned else ()
        return [
            _choose(sequence.sampler, row, chunk.end) if chunk.samples else None
            for (sequence, chunk), row in zip(planned, rows, strict=True)
        ]

    async def _taken_apart(self, planned: Planned, error: Exception) -> Results:
        """Of a pass that has failed."""
        if len(planned) == 1:
            self._failures += 1
            return [_failure(error)]
        results: Results = []
        for sequence, chunk in planned:
            try:
                # What the runner keeps of it beside its blocks may be anything now.
                results += [None] if sequence.over else await self._compute([(sequence, chunk)], [chunk.sequence])
            except _HungError:
                raise
            except Exception as alone:
                log.warning("request %s fails the pass by itself: %s", sequence.id, alone)
                results.append(_failure(alone))
        self._failures = self._failures + 1 if all(isinstance(result, PddError) for result in results) else 0
        return results

    async def _idle(self, forgotten: list[int]) -> None:
        """Until there may be something to plan. Where sequences wait for blocks, not for ever: nobody here can give
        them any."""
        if forgotten:
            await self._compute([], forgotten)
        if (waiting := self._scheduler.waiting) and now() - max(self._ended, waiting[0].since) >= self._kv_wait:
            self._refuse(waiting[0])
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_RETRY if waiting else None):
                await self._work.wait()

    def _refuse(self, sequence: Sequence) -> None:
        sequence.fail(
            CapacityError(
                "there were no blocks of KV for this request",
                where=f"request {sequence.id}",
                why=f"nothing was computed for {self._kv_wait:g} s, and what others hold did not come free",
                fix="give the pool more kv_memory or replicas; kv_wait says how long a request waits",
            )
        )
        self._scheduler.remove(sequence)

    def _hung(self) -> EngineError:
        frame = sys._current_frames().get(self._ident)
        stack = traceback.format_stack(frame) if frame is not None else []
        log.error("a forward pass hangs, here:\n%s", "".join(stack))
        return EngineError(
            f"a forward pass has not ended in {self.step_timeout:g} s",
            why=" ".join(stack[-1].split()) if stack else "",
            fix="where passes may take so long, raise the pool's step_timeout",
        )


class _HungError(Exception):
    """A pass takes too long."""


def _choose(sampler: Sampler, logits: Logits | None, position: int) -> Token | PddError:
    """One request's trouble is no other's."""
    assert logits is not None, "no logits of a chunk that samples"
    try:
        return sampler.sample(logits, position)
    except PddError as error:
        return error
    except Exception as error:
        log.exception("a token cannot be chosen")
        return EngineError("the token cannot be chosen", why=f"{type(error).__name__}: {error}")


def _failure(error: Exception) -> PddError:
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError):
        fix = "lower the pool's token_budget or batch_limit, or its kv_memory"
        return CapacityError("there was no memory for the forward pass", why=why, fix=fix)
    return EngineError("the forward pass failed", why=why)


def _told(results: Results) -> str:
    return next((" ".join(str(result).split()) for result in results if isinstance(result, PddError)), "")
