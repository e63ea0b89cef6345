"""A prefill worker: prompts in chunks, several in one pass."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from pdd_runtime.planner.simulate.cache import SimCache, Spans
from pdd_runtime.planner.simulate.pool import Pool, Worker


class Prompt(Protocol):
    """Whose prompt is computed."""

    @property
    def prompt(self) -> int:
        """Tokens."""

    @property
    def spans(self) -> Spans: ...

    def cache_prompt(self, cache: SimCache) -> None:
        """It is computed, and cached."""

    def begins(self, cached: int) -> None:
        """Its first pass begins; so many leading tokens were there."""

    def computed(self, position: int) -> None:
        """So many leading tokens are; not called for the last ones."""

    def prefilled(self) -> None:
        """All are, and the first token is made."""


class _Job:
    __slots__ = ("context", "left", "new", "prompt")

    def __init__(self, prompt: Prompt, context: int, left: int) -> None:
        self.prompt, self.context, self.left, self.new = prompt, context, left, left


class PrefillWorker(Worker):
    """Passes one behind the other. Of a pass's tokens half are the oldest prompt's, the rest goes to whoever has the
    least left, as `pdd_runtime.inprocess.scheduler` shares them."""

    __slots__ = ("_computed", "_jobs", "_passing", "_queue")

    def __init__(self, pool: Pool, index: int) -> None:
        super().__init__(pool, index)
        self._jobs: list[_Job] = []
        self._queue: deque[Prompt] = deque()
        self._passing = False
        self._computed = 0.0
        """Seconds of passes since a prompt ended."""

    def add(self, prompt: Prompt) -> None:
        self._queue.append(prompt)
        self.waiting += 1
        if not self._passing:
            self._next()

    def fail(self) -> None:
        super().fail()
        self._jobs.clear()
        self._queue.clear()
        self._passing = False

    def remove(self, prompt: Prompt) -> None:
        """It is not wanted any more."""
        self._jobs[:] = [job for job in self._jobs if job.prompt is not prompt]
        if prompt in self._queue:
            self._queue.remove(prompt)
        self.running, self.waiting = len(self._jobs), len(self._queue)

    def _next(self) -> None:
        jobs, queue, pool = self._jobs, self._queue, self.pool
        now = self.events.now
        while queue and len(jobs) < pool.batch_limit:
            prompt = queue.popleft()
            cached = min(self.cache.hit(prompt.spans), prompt.prompt - 1)
            jobs.append(_Job(prompt, cached, prompt.prompt - cached))
            self.waiting -= 1
            self.running += 1
            prompt.begins(cached)
        if not jobs:
            self._passing = False
            return
        self._passing = True
        if len(jobs) == 1:
            job = jobs[0]
            tokens = job.left if job.left < pool.chunk else pool.chunk
            seconds = pool.latency.prefill(tokens, job.context)
            parts: tuple[tuple[_Job, int], ...] = ((job, tokens),)
        else:
            parts = self._share(pool.chunk)
            total = sum([tokens for _, tokens in parts])
            context = sum([tokens * job.context for job, tokens in parts]) // total
            seconds = pool.latency.prefill(total, context)
        self.pool.busy += seconds
        self.events.push(now + seconds, self._passed, self.epoch, parts, seconds)

    def _share(self, budget: int) -> tuple[tuple[_Job, int], ...]:
        jobs = self._jobs
        oldest = jobs[0]
        shares = {0: min(oldest.left, -(-budget // 2))}
        budget -= shares[0]
        for place in sorted(range(len(jobs)), key=lambda place: jobs[place].left):
            had = shares.get(place, 0)
            more = min(jobs[place].left - had, budget)
            if more > 0:
                shares[place] = had + more
                budget -= more
        return tuple((jobs[place], tokens) for place, tokens in shares.items())

    def _passed(self, epoch: int, parts: tuple[tuple[_Job, int], ...], seconds: float) -> None:
        if epoch != self.epoch:
            return
        pool, jobs = self.pool, self._jobs
        self._computed += seconds
        for job, tokens in parts:
            job.left -= tokens
            job.context += tokens
            if job.left:
                job.prompt.computed(job.context)
                continue
            if job in jobs:
                jobs.remove(job)
                self.running -= 1
                prompt = job.prompt
                pool.token_time.add(self._computed, job.new)
                pool.request_time.add(self._computed, 1)
                self._computed = 0.0
                prompt.cache_prompt(self.cache)
                prompt.prefilled()
        if jobs or self._queue:
            self._next()
        else:
            self._passing = False
