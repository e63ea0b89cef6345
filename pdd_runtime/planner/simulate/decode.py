"""A worker that decodes: a batch of sequences, one token each a step, and extends between them.

Steps are not gone through one by one. Between two changes of the batch a step takes the same time, so which step is
done when follows from the last change: `_steps` steps were done at `_boundary`, where the next one begins.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from heapq import heappop, heappush
from math import ceil, floor, inf
from typing import Final, Protocol

from pdd_runtime.planner.simulate.pool import Pool, Worker

_SLACK: Final = 1e-6
"""Of a step: rounding."""


class Answer(Protocol):
    """Whose tokens are made."""

    def begun(self, first: float, step: float) -> None:
        """It is in the batch: its first token will be there at `first`, and the next ones `step` seconds apart, as long
        as nothing changes."""

    def ended(self, longest: float) -> None:
        """All its tokens are made, the slowest in a step of `longest` seconds."""


class Sequence:
    """One answer on one worker."""

    __slots__ = ("answer", "context", "extend", "joined", "need", "since", "start", "target", "tokens")

    def __init__(self, answer: Answer, context: int, extend: int, tokens: int) -> None:
        """`context`: tokens that are known. The last `extend` of them, at least one, are computed there first; `tokens`
        more are to be made."""
        self.answer, self.context, self.extend, self.tokens = answer, context, extend, tokens
        self.need = context + tokens
        """Tokens of KV that it will have at its end."""
        self.since = 0.0
        self.joined = False
        self.start = self.target = 0
        """Steps of the worker before it began and when it is to end."""


class DecodeWorker(Worker):
    """Relay, main or aggregated."""

    __slots__ = (
        "_began", "_boundary", "_computing", "_context", "_ends", "_needed", "_numbers", "_queue", "_slow",
        "_step", "_steps", "_wake",
    )  # fmt: skip

    def __init__(self, pool: Pool, index: int) -> None:
        super().__init__(pool, index)
        self._queue: deque[Sequence] = deque()
        self._computing: deque[Sequence] = deque()
        """Those whose known tokens take more than one pass; the first one's pass is under way."""
        self._ends: list[tuple[int, int, Sequence]] = []
        self._slow: list[tuple[int, float]] = []
        """(step, seconds): of each step that none since was slower than. Times fall along the list."""
        self._context = 0
        """Tokens of all that are in the batch."""
        self._needed = 0
        """And at their ends, with those whose known tokens are computed: they must fit."""
        self._steps = 0
        self._step = 0.0
        self._boundary = self._began = 0.0
        """When the next step begins, and when its pass did, which may have extends before it."""
        self._wake = inf
        self._numbers = 0

    def decode(self, answer: Answer, context: int, extend: int, tokens: int) -> Sequence:
        """Go on behind `context` tokens, of which the last `extend` are computed first."""
        sequence = Sequence(answer, context, extend, tokens)
        self.enqueue(sequence)
        return sequence

    def enqueue(self, sequence: Sequence) -> None:
        """The same, for one that has been made before."""
        sequence.since = self.events.now
        if self._queue or not self._takes(sequence):
            self._queue.append(sequence)
            self.waiting += 1
        else:
            self._enter(sequence)

    def extend(self, context: int, tokens: int) -> float:
        """Compute the last `tokens` of `context` known ones, beside what is decoded. Returns when it is done."""
        self._advance()
        now, pool = self.events.now, self.pool
        if self.running:
            self._delay(self._extra(context, tokens))
            done = self._boundary + self._step
            self._reschedule()
        else:
            seconds = self._passes(context, tokens)
            pool.busy += seconds
            done = self._boundary = max(now, self._boundary) + seconds
        pool.request_time.add((done - now) / pool.batch_limit, 1)
        return done

    def made(self, sequence: Sequence) -> int:
        """Its tokens so far."""
        if not sequence.joined:
            return 0
        now, slack = self.events.now, _SLACK * self._step
        behind = now - self._boundary
        if behind >= -slack:
            steps = self._steps + floor(behind / self._step + _SLACK)
        else:
            steps = self._steps - (now < self._began - slack)
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
            self.waiting -= 1
        elif sequence in self._computing:
            self._computing.remove(sequence)
            self._needed -= sequence.need

    @property
    def owed(self) -> float:
        seconds = self.events.now - self._boundary
        return seconds if self.running or seconds < 0.0 else 0.0

    def fail(self) -> None:
        """It is dead, and begins anew with nothing."""
        super().fail()
        self._queue.clear()
        self._computing.clear()
        self._ends.clear()
        self._slow.clear()
        self._context = self._needed = 0
        self._wake = inf

    # The batch

    def _takes(self, sequence: Sequence) -> bool:
        """There is a place in the batch, and room for all of its KV: what is only cached goes for it. One that finds
        nobody there always fits."""
        there, pool = self.running + len(self._computing), self.pool
        return there < pool.batch_limit and (self._needed + sequence.need <= pool.capacity or not there)

    def _enter(self, sequence: Sequence) -> None:
        self._needed += sequence.need
        if sequence.extend <= self.pool.chunk:
            self._join(sequence)
            return
        self._computing.append(sequence)
        if len(self._computing) == 1:
            self._pass(self.epoch)

    def _pass(self, epoch: int) -> None:
        """The next chunk of the oldest of those whose known tokens take several passes."""
        computing, pool = self._computing, self.pool
        if epoch != self.epoch or not computing:
            return
        sequence = computing[0]
        if sequence.extend <= pool.chunk:
            computing.popleft()
            self._join(sequence)
        else:
            self._advance()
            at = sequence.context - sequence.extend + pool.chunk
            sequence.extend -= pool.chunk
            if self.running:
                self._delay(self._extra(at, pool.chunk))
                self._reschedule()
            else:
                seconds = pool.latency.prefill(pool.chunk, at - pool.chunk)
                pool.busy += seconds
                self._boundary = max(self.events.now, self._boundary) + seconds
        if computing:
            self.events.push(self._boundary + (self._step if self.running else 0.0), self._pass, epoch)

    def _join(self, sequence: Sequence) -> None:
        self._advance()
        late = self.running > 0 and self.events.now > self._began + _SLACK * self._step
        self.running += 1
        self._context += sequence.context
        sequence.joined = True
        sequence.start = self._steps + late
        sequence.target = sequence.start + sequence.tokens
        self._numbers += 1
        heappush(self._ends, (sequence.target, self._numbers, sequence))
        self._price()
        self._delay(self._extra(sequence.context, sequence.extend) if sequence.extend > 1 else 0.0)
        self._reschedule()
        sequence.answer.begun(self._boundary + (1 + late) * self._step, self._step)

    def _delay(self, seconds: float) -> None:
        """The next step takes so much longer."""
        self._boundary += seconds
        slow, took = self._slow, self._boundary - self._began + self._step
        while slow and slow[-1][1] <= took:
            slow.pop()
        slow.append((self._steps + 1, took))

    def _longest(self, sequence: Sequence) -> float:
        """The slowest step in which one of its tokens was made, its first apart."""
        place = bisect_left(self._slow, (sequence.start + 2,))
        return self._slow[place][1] if place < len(self._slow) else self._step

    def _leave(self, sequence: Sequence) -> None:
        sequence.joined = False
        self.running -= 1
        self._needed -= sequence.need
        self._context -= sequence.context + max(0, self._steps - sequence.start)
        self.pool.request_time.add((self.events.now - sequence.since) / self.pool.batch_limit, 1)

    def _fill(self) -> None:
        if self.running:
            self._price()
        elif self._slow:
            self._slow.clear()
        while self._queue and self._takes(self._queue[0]):
            self.waiting -= 1
            self._enter(self._queue.popleft())
        self._reschedule()

    def _advance(self) -> None:
        """Up to the beginning of the next step."""
        now = self.events.now
        behind = now - self._boundary
        if behind <= 0:
            return
        if not self.running:
            self._boundary = self._began = now
            return
        steps = ceil(behind / self._step - _SLACK)
        if steps > 0:
            seconds = steps * self._step
            self._boundary += seconds
            self._steps += steps
            self._context += steps * self.running
            self.pool.busy += seconds
        self._began = self._boundary

    def _price(self) -> None:
        # Contexts grow: as they are halfway to the next end, which is the next change at the latest.
        growth = (self._ends[0][0] - self._steps) / 2 if self._ends else 0.0
        self._step = self.pool.latency.decode(self.running, self._context / self.running + max(0.0, growth))

    def _extra(self, context: int, tokens: int) -> float:
        """Seconds that a step takes longer because so many known tokens are computed in it instead of one."""
        latency = self.pool.latency
        before = context - tokens
        seconds = self._passes(context, tokens) - latency.prefill(1, before)
        self.pool.busy += max(0.0, seconds)
        return max(0.0, seconds)

    def _passes(self, context: int, tokens: int) -> float:
        """Seconds of passes over the last `tokens` of `context` known ones."""
        latency, chunk = self.pool.latency, self.pool.chunk
        seconds, at = 0.0, context - tokens
        while tokens > chunk:
            seconds += latency.prefill(chunk, at)
            at += chunk
            tokens -= chunk
        return seconds + latency.prefill(tokens, at)

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
                over.append((sequence, self._longest(sequence)))
                self._leave(sequence)
        self._fill()
        for sequence, longest in over:
            sequence.answer.ended(longest)
