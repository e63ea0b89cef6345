"""A worker that decodes: a batch of sequences, one token each a step, and extends between them.

Steps are not gone through one by one. Between two changes of the batch a step takes the same time, so which step is
done when follows from the last change: `_steps` steps were done at `_boundary`, where the next one begins.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import ceil, floor, inf
from typing import Protocol

from pdd_runtime.planner.simulate.pool import Pool, Worker

_SLACK = 1e-6
"""Of a step: rounding."""


class Answer(Protocol):
    """Whose tokens are made."""

    def begun(self, first: float, step: float) -> None:
        """It is in the batch: its first token will be there at `first`, and the next ones `step` seconds apart, as long
        as nothing changes."""

    def ended(self) -> None:
        """All its tokens are made."""


class Sequence:
    """One answer on one worker."""

    __slots__ = ("answer", "context", "extend", "joined", "since", "start", "target", "tokens")

    def __init__(self, answer: Answer, context: int, extend: int, tokens: int, since: float) -> None:
        """`context`: tokens that are known. The last `extend` of them, at least one, are computed there first; `tokens`
        more are to be made."""
        self.answer, self.context, self.extend, self.tokens, self.since = answer, context, extend, tokens, since
        self.joined = False
        self.start = self.target = 0
        """Steps of the worker before it began and when it is to end."""


class DecodeWorker(Worker):
    """Relay, main or aggregated."""

    __slots__ = (
        "_active", "_began", "_boundary", "_context", "_ends", "_numbers", "_queue", "_step", "_steps", "_wake",
    )  # fmt: skip

    def __init__(self, pool: Pool, index: int) -> None:
        super().__init__(pool, index)
        self._queue: deque[Sequence] = deque()
        self._ends: list[tuple[int, int, Sequence]] = []
        self._active = 0
        self._context = 0
        """Tokens of all that are in the batch."""
        self._steps = 0
        self._step = 0.0
        self._boundary = self._began = 0.0
        """When the next step begins, and when its pass did, which may have extends before it."""
        self._wake = inf
        self._numbers = 0

    @property
    def running(self) -> int:
        return self._active

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def decode(self, answer: Answer, context: int, extend: int, tokens: int) -> Sequence:
        """Go on behind `context` tokens, of which the last `extend` are computed first."""
        sequence = Sequence(answer, context, extend, tokens, self.events.now)
        if self._active < self.pool.model.batch_limit and not self._queue:
            self._join(sequence)
        else:
            self._queue.append(sequence)
        return sequence

    def extend(self, context: int, tokens: int) -> float:
        """Compute the last `tokens` of `context` known ones, beside what is decoded. Returns when it is done."""
        self._advance()
        now, model = self.events.now, self.pool.model
        if self._active:
            self._boundary += self._extra(context, tokens)
            done = self._boundary + self._step
            self._reschedule()
        else:
            seconds = self._passes(context, tokens)
            self.pool.busy += seconds
            done = self._boundary = max(now, self._boundary) + seconds
        self.pool.request_time.add((done - now) / model.batch_limit, 1)
        return done

    def made(self, sequence: Sequence) -> int:
        """Its tokens so far."""
        if not sequence.joined:
            return 0
        behind = self.events.now - self._boundary
        steps = self._steps + floor(behind / self._step + _SLACK) if behind >= -_SLACK * self._step else self._steps - 1
        return min(max(0, steps - sequence.start), sequence.target - sequence.start)

    def when(self, sequence: Sequence, tokens: int) -> float:
        """When it will have made so many, as things stand."""
        return self._boundary + (sequence.start + tokens - self._steps) * self._step

    def stop_at(self, sequence: Sequence, tokens: int) -> None:
        """It is to make so many, fewer than it was to, and more than it has."""
        sequence.tokens = tokens
        if sequence.joined:
            sequence.target = sequence.start + tokens
            self._numbers += 1
            heappush(self._ends, (sequence.target, self._numbers, sequence))
            self._reschedule()

    def remove(self, sequence: Sequence) -> None:
        """It is not wanted any more. Idempotent."""
        if sequence.joined:
            self._advance()
            self._leave(sequence)
            self._fill()
        elif sequence in self._queue:
            self._queue.remove(sequence)

    def fail(self) -> None:
        """It is dead."""
        self.epoch += 1
        self._queue.clear()
        self._ends.clear()
        self._active = self._context = 0
        self._wake = inf
        self.cache.clear()

    # The batch

    def _join(self, sequence: Sequence) -> None:
        now = self.events.now
        self._advance()
        late = now > self._began + _SLACK * self._step
        self._active += 1
        self._context += sequence.context
        self._price()
        if sequence.extend > 1:
            self._boundary += self._extra(sequence.context, sequence.extend)
        sequence.joined = True
        sequence.start = self._steps + late
        sequence.target = sequence.start + sequence.tokens
        self._numbers += 1
        heappush(self._ends, (sequence.target, self._numbers, sequence))
        self._reschedule()
        sequence.answer.begun(self._boundary + (1 + late) * self._step + self.pool.model.overhead, self._step)

    def _leave(self, sequence: Sequence) -> None:
        sequence.joined = False
        self._active -= 1
        made = self._steps - sequence.start
        self._context -= sequence.context + max(0, made)
        self.pool.request_time.add((self.events.now - sequence.since) / self.pool.model.batch_limit, 1)

    def _fill(self) -> None:
        if self._active:
            self._price()
        while self._queue and self._active < self.pool.model.batch_limit:
            self._join(self._queue.popleft())
        self._reschedule()

    def _advance(self) -> None:
        """Up to the beginning of the next step."""
        now = self.events.now
        behind = now - self._boundary
        if behind <= 0:
            return
        if not self._active:
            self._boundary = self._began = now
            return
        steps = ceil(behind / self._step - _SLACK)
        if steps > 0:
            seconds = steps * self._step
            self._boundary += seconds
            self._steps += steps
            self._context += steps * self._active
            self.pool.busy += seconds
        self._began = self._boundary

    def _price(self) -> None:
        self._step = self.pool.model.latency.decode(self._active, self._context / self._active)

    def _extra(self, context: int, tokens: int) -> float:
        """Seconds that a step takes longer because so many known tokens are computed in it instead of one."""
        latency = self.pool.model.latency
        before = context - tokens
        seconds = self._passes(context, tokens) - latency.prefill(1, before)
        self.pool.busy += max(0.0, seconds)
        return max(0.0, seconds)

    def _passes(self, context: int, tokens: int) -> float:
        """Seconds of passes over the last `tokens` of `context` known ones."""
        model = self.pool.model
        prefill, chunk = model.latency.prefill, model.chunk
        seconds, at = 0.0, context - tokens
        while tokens > chunk:
            seconds += prefill(chunk, at)
            at += chunk
            tokens -= chunk
        return seconds + prefill(tokens, at)

    # Ends

    def _reschedule(self) -> None:
        ends = self._ends
        while ends and (not ends[0][2].joined or ends[0][2].target != ends[0][0]):
            heappop(ends)
        if not ends:
            return
        due = self._boundary + (ends[0][0] - self._steps) * self._step
        if due < self._wake:
            self._wake = due
            self.events.push(max(due, self.events.now), self._woken, due, self.epoch)

    def _woken(self, due: float, epoch: int) -> None:
        if due != self._wake or epoch != self.epoch:
            return
        self._wake = inf
        self._advance()
        ends, steps = self._ends, self._steps
        over = []
        while ends and ends[0][0] <= steps:
            target, _, sequence = heappop(ends)
            if sequence.joined and sequence.target == target:
                self._leave(sequence)
                over.append(sequence)
        self._fill()
        for sequence in over:
            sequence.answer.ended()
