"""The stand-in's loop of passes: continuous batching, prefill in chunks, reuse of pages; a connector, or transfers."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from pdd_runtime.plugins.engine import Sampling
from pdd_trtllm.testing.disaggregation import Asked, Generation
from pdd_trtllm.testing.driver import ConnectorDriver
from pdd_trtllm.testing.model import PagedModel
from pdd_trtllm.testing.pages import Held, PageCache
from pdd_trtllm.testing.task import Failed, Finish, OnTokens, Task
from pdd_trtllm.testing.transceiver import Outcome, Transceiver

log = logging.getLogger(__name__)

_TURN = 0.001
"""Seconds of a turn of the loop in which nothing could be computed."""


@dataclass(frozen=True)
class Limits:
    batch: int
    pass_tokens: int
    chunked: bool
    overlap: bool
    pause: float = 0.0
    """Seconds that a pass takes at least."""


@dataclass
class _Pass:
    """What was put on the device together."""

    context: list[tuple[Task, int]] = field(default_factory=list)
    generation: list[Task] = field(default_factory=list)
    chose: list[Task] = field(default_factory=list)
    """Those that it chose a token for."""

    @property
    def tasks(self) -> list[Task]:
        return [task for task, _ in self.context] + self.generation


class Executor:
    """A thread. Where nothing is to be computed it waits for a request, and polls nobody."""

    def __init__(
        self,
        model: PagedModel,
        cache: PageCache,
        limits: Limits,
        driver: ConnectorDriver | None = None,
        transfers: float | None = None,
    ) -> None:
        """`transfers`: seconds that one may take; None: there are none."""
        self._model, self._cache, self._limits, self._driver = model, cache, limits, driver
        self._inbox: queue.SimpleQueue[Task | int | Outcome | None] = queue.SimpleQueue()
        self.transceiver = None if transfers is None else Transceiver(model, transfers, self._inbox.put)
        self._kept: dict[int, Held] = {}
        """Pages of contexts that wait for their reader."""
        self._waiting: deque[Task] = deque()
        self._active: list[Task] = []
        self._cancelled: set[int] = set()
        self._previous: _Pass | None = None
        self._next = 2048
        self._number = threading.Lock()
        self.error: BaseException | None = None
        """What ended the loop."""
        self.passes = 0
        self.computed = 0
        """Tokens whose KV was computed, in all passes."""
        self.reused: dict[int, int] = {}
        """Tokens of each request's prompt that were found; who asks for a request removes it in the end."""
        self.stats: deque[dict[str, object]] = deque(maxlen=1000)
        """Of the passes since somebody looked."""
        self._thread = threading.Thread(target=self._run, name="executor", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling,
        include_stop: bool,
        on_tokens: OnTokens,
        asked: Asked = None,
    ) -> int:
        """The number of the request: the engine's own."""
        with self._number:
            self._next += 1
            number = self._next
        self._inbox.put(Task(number, prompt, max_tokens, sampling, include_stop, on_tokens, asked))
        return number

    def cancel(self, number: int) -> None:
        self._inbox.put(number)

    def _stats(self) -> dict[str, object]:
        return {
            "iter": self.passes,
            "numActiveRequests": len(self._active),
            "numQueuedRequests": len(self._waiting),
            "maxNumActiveRequests": self._limits.batch,
            "kvCacheStats": {
                "maxNumBlocks": self._cache.count,
                "usedNumBlocks": self._cache.used,
                "freeNumBlocks": self._cache.free,
                "tokensPerBlock": self._cache.tokens,
            },
        }

    def stop(self) -> None:
        self._inbox.put(None)
        self._thread.join()
        if self.transceiver is not None:
            self.transceiver.close()

    def _run(self) -> None:
        try:
            while self._fetch():
                self._iterate()
        except BaseException as error:
            log.exception("error in the event loop")
            self.error = error
            for task in [*self._active, *self._waiting]:
                task.on_tokens([], "cancelled")

    def _fetch(self) -> bool:
        """Take what has come; wait where there is nothing else to do. False: the end."""
        idle = all(task.receiving for task in self._active) and not self._waiting and self._previous is None
        patience = None if self.transceiver is None else self.transceiver.patience
        while idle or not self._inbox.empty():
            try:
                item = self._inbox.get(timeout=patience)
            except queue.Empty:
                break
            idle = False
            if item is None:
                return False
            if isinstance(item, int):
                self._cancelled.add(item)
            elif isinstance(item, Outcome):
                self._transferred(item)
            else:
                self._waiting.append(item)
        return True

    def _iterate(self) -> None:
        began = time.monotonic()
        batch = self._schedule()
        if batch.tasks:
            self._compute(batch)
            self.stats.append(self._stats())
        if self._limits.overlap:
            if self._previous is not None:
                self._process(self._previous)
            self._previous = batch if batch.tasks else None
        elif batch.tasks:
            self._process(batch)
        self._cancel()
        if self._driver is not None:
            for task in self._driver.saved():
                self._cache.release(task.held)
        if self.transceiver is not None:
            for number in self.transceiver.expire():
                self._cache.release(self._kept.pop(number))
        pause = self._limits.pause if batch.tasks else _TURN
        time.sleep(max(0.0, began + pause - time.monotonic()))

    def _schedule(self) -> _Pass:
        batch, room = _Pass(), self._limits.pass_tokens
        for task in self._active:
            if task.begun and not task.in_context and not task.receiving and not task.full:
                batch.generation.append(task)
                room -= 1
        self._admit()
        for task in self._active:
            if isinstance(task.asked, Generation) and not task.begun:
                self._receive(task, task.asked)
            if task.in_context and room > 0:
                if not task.begun:
                    self._begin(task)
                tokens = min(task.prompt - task.computed, room)
                if task.computed + tokens < task.prompt:
                    # A part ends where a page does.
                    end = (task.computed + tokens) // self._cache.tokens * self._cache.tokens
                    tokens = end - task.computed
                if tokens > 0:
                    batch.context.append((task, tokens))
                    room -= tokens
        return batch

    def _admit(self) -> None:
        """Requests that can run to their ends: none is ever evicted."""
        while self._waiting and len(self._active) < self._limits.batch:
            task = self._waiting[0]
            if task.request_id in self._cancelled:
                self._waiting.popleft()
                task.on_tokens([], "cancelled")
                continue
            owed = sum(self._pages(one.most) - len(one.held.pages) for one in self._active)
            if self._pages(task.most) > self._cache.free - owed:
                return
            self._active.append(self._waiting.popleft())

    def _begin(self, task: Task) -> None:
        task.begun = True
        self._find(task)
        loaded = 0 if self._driver is None else self._driver.match(task, task.reused)
        task.computed = task.reused + loaded

    def _find(self, task: Task) -> None:
        task.held, task.reused = self._cache.begin(task.known)
        self.reused[task.request_id] = task.reused

    def _receive(self, task: Task, asked: Generation) -> None:
        """Have the KV of its prompt come, but for what is here."""
        task.begun = task.receiving = True
        self._find(task)
        assert self.transceiver is not None
        self.transceiver.pull(task.request_id, asked, task.held.pages, task.reused, task.prompt)

    def _transferred(self, outcome: Outcome) -> None:
        if outcome.kind == "sent":
            self._cache.release(self._kept.pop(outcome.request))
            return
        [task] = [task for task in self._active if task.request_id == outcome.request]
        task.receiving = False
        if outcome.kind == "lost":
            self._active.remove(task)
            task.ended = True
            self._cache.release(task.held)
            task.on_tokens([], Failed(outcome.why))
            return
        assert isinstance(task.asked, Generation)
        task.computed = task.prompt
        task.device.append(task.asked.first)
        self._tell(task)

    def _compute(self, batch: _Pass) -> None:
        self.passes += 1
        for task in batch.generation:
            self._cache.grow(task.held, task.computed + 1)
        if self._driver is not None:
            self._driver.begin_pass(batch.context, batch.generation)
        states: dict[int, int] = {}

        def compute() -> None:
            for task, tokens in [*batch.context, *((task, 1) for task in batch.generation)]:
                tail = task.device[: task.computed + tokens]
                states[task.request_id] = self._model.extend(tail, task.computed, task.held.pages)

        for index in range(self._model.layout.layers):
            last = index == self._model.layout.layers - 1
            if self._driver is None:
                if last:
                    compute()
            else:
                self._driver.layer(index, compute if last else _nothing)
        if self._driver is not None:
            self._driver.end_pass()
        for task, tokens in [*batch.context, *((task, 1) for task in batch.generation)]:
            self.computed += tokens
            task.computed += tokens
            if task.computed >= task.prompt and not task.full:
                task.device.append(self._model.choose(states[task.request_id], task.device, task.sampling))
                batch.chose.append(task)

    def _process(self, batch: _Pass) -> None:
        """The tokens that a pass has chosen reach the scheduler, and the caller."""
        for task in batch.chose:
            if task.ended:
                continue
            self._tell(task)

    def _tell(self, task: Task) -> None:
        """The next token that the device has chosen."""
        if len(task.known) == task.prompt:
            self._cache.keep(task.held, task.known)
        token = task.device[len(task.known)]
        task.known.append(token)
        if token in task.sampling.stop_token_ids:
            self._end(task, "stop", [token] if task.include_stop else [])
        elif len(task.known) >= task.most:
            self._end(task, "length", [token])
        else:
            task.on_tokens([token], None)

    def _end(self, task: Task, finish: Finish, tokens: list[int]) -> None:
        task.ended = True
        self._active.remove(task)
        # What has no KV yet is the last token's.
        self._cache.keep(task.held, task.known[:-1], tail=True)
        if task.asked == "context_only" and finish == "length":
            assert self.transceiver is not None
            self._kept[task.request_id] = task.held
            self.transceiver.keep(task.request_id, task.held.pages, task.prompt)
        elif self._driver is None or not self._driver.finish(task):
            self._cache.release(task.held)
        task.on_tokens(tokens, finish)

    def _cancel(self) -> None:
        for task in [task for task in self._active if task.request_id in self._cancelled]:
            if task.receiving:
                assert self.transceiver is not None
                self.transceiver.abandon(task.request_id, "the request was cancelled")
                continue
            task.ended = True
            self._active.remove(task)
            # A connector is not told.
            self._cache.release(task.held)
            task.on_tokens([], "cancelled")
        self._waiting = deque(task for task in self._waiting if not self._drop(task))
        self._cancelled.clear()

    def _drop(self, task: Task) -> bool:
        if task.request_id in self._cancelled:
            task.on_tokens([], "cancelled")
            return True
        return False

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._cache.tokens)


def _nothing() -> None:
    """A layer but the last: the model computes all of them at once."""
