"""What all requests of one frontend share."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import msgspec

from pdd_runtime.clock import now
from pdd_runtime.errors import Cancelled, DeadlineExceeded, NoRoute, PddError
from pdd_runtime.frontend.bell import Turn
from pdd_runtime.frontend.errors import EndedByOperatorError
from pdd_runtime.frontend.experiment import Experiment
from pdd_runtime.frontend.language import Language
from pdd_runtime.frontend.model import ServedModel
from pdd_runtime.observe import Timelines
from pdd_runtime.observe.metrics import Metrics
from pdd_runtime.observe.pace import Pace
from pdd_runtime.pipeline import Driver

log = logging.getLogger(__name__)

LOAD_TIMEOUT = 20.0
"""Seconds for a worker to send the tokenizer, and for this process to read it."""

_LOOK_EVERY = 0.05
FAREWELL = 0.5
"""Seconds for the last event of an answer that a stop cuts off to be sent."""


class Listed(msgspec.Struct, frozen=True):
    """One line of the list of requests."""

    id: str
    status: int | None
    """None: it runs."""
    seconds: float
    """From arrival to the end, or until now."""
    tokens: int
    """Sent to the client."""
    key: str = ""
    """The name of the API key that asked; empty where there are none."""
    variant: str = ""
    """Of the graph's, that serves it; empty where there are none."""


class Ended(msgspec.Struct, frozen=True):
    """A request that ended, and when, on the clock of the host."""

    at: float
    line: Listed


class Recent(msgspec.Struct, frozen=True):
    """The requests that run, and the last that ended, oldest first in both."""

    running: list[Listed]
    ended: list[Ended]


class Running(Protocol):
    """A request that is being answered."""

    def listed(self) -> list[Listed]:
        """How far its sessions are."""
        ...

    def fail(self, error: Exception) -> None:
        """End it everywhere, and tell its client."""
        ...


class Service:
    """The driver, the model it serves, and what is known about requests."""

    def __init__(
        self,
        driver: Driver,
        timelines: Timelines,
        deadline: float | None = None,
        experiment: Experiment | None = None,
    ) -> None:
        """`deadline`: seconds that a request may take. `experiment`: of a graph with variants."""
        self.driver, self.timelines, self.deadline, self.experiment = driver, timelines, deadline, experiment
        self.turn = Turn()
        collectors = (*driver.collectors, *([experiment] if experiment else ()))
        self.metrics = Metrics(lambda: driver.sessions, driver.links, collectors, variants=experiment is not None)
        self._ended: deque[Ended] = deque(maxlen=timelines.limit)
        self._model: ServedModel | None = None
        self._loading = asyncio.Lock()
        self._running: dict[Running, None] = {}
        """In the order in which they came."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._leaving = self._stopping = False

    def why_not_ready(self) -> str | None:
        """None while a request that comes now would find a whole route."""
        if self._leaving:
            return "the frontend is stopping"
        return self._lacking()

    async def model(self) -> ServedModel:
        """The model, its tokenizer loaded. Raises `NoRoute` at once where there is no whole route: a client
        that is told to come back knows more than one that waits."""
        if (why := "the frontend is stopping" if self._stopping else self._lacking()) is not None:
            raise NoRoute("this graph is not ready for requests", why=why, fix="wait until /ready answers 200")
        return await self._load()

    def _lacking(self) -> str | None:
        return None if self.driver.ready else self.driver.why_not_ready

    async def warm(self) -> None:
        """Load the tokenizer as soon as there is a worker to give it, so that the first request need not."""
        try:
            await self.driver.info()
            await self._load()
        except PddError as error:
            log.warning("the tokenizer is left to the first request: %s", error)

    async def _load(self) -> ServedModel:
        try:
            async with asyncio.timeout(LOAD_TIMEOUT), self._loading:
                info = await self.driver.info()
                if self._model is None or self._model.info.fingerprint != info.fingerprint:
                    files = await self.driver.tokenizer()
                    self._model = ServedModel(info, await asyncio.to_thread(Language, files))
                elif self._model.context_length != info.context_length:
                    # The shortest of the workers has come, or gone.
                    self._model = ServedModel(info, self._model.language)
                return self._model
        except TimeoutError:
            raise DeadlineExceeded(f"no worker gave the model's tokenizer within {LOAD_TIMEOUT:g} s") from None

    @contextmanager
    def running(self, answer: Running) -> Iterator[None]:
        """Inside, it is being answered."""
        self._running[answer] = None
        self._idle.clear()
        try:
            yield
        finally:
            del self._running[answer]
            if not self._running:
                self._idle.set()

    def recent(self) -> Recent:
        """The requests of this process; `Siblings.requests` has those of the graph."""
        return Recent([line for answer in self._running for line in answer.listed()], list(self._ended))

    def cancel(self, session_id: str, by: str) -> bool:
        """End the request of which this is a session, with all its others. False: none of this process runs it."""
        for answer in self._running:
            if any(line.id == session_id for line in answer.listed()):
                answer.fail(EndedByOperatorError(f"the request was cancelled by {by}"))
                return True
        return False

    def ended(self, session_id: str, status: int, seconds: float, pace: Pace | None = None, key: str = "") -> None:
        """Count a session that ended, or a request that never became one."""
        timeline = self.timelines.get(session_id)
        variant = timeline.variant if timeline else ""
        ended = Listed(session_id, status, round(seconds, 6), pace.tokens if pace else 0, key, variant)
        log.info("request %s ended: status %d, %d tokens, %.3f s", session_id, status, ended.tokens, seconds)
        self._ended.append(Ended(now(), ended))
        self.metrics.ended(status, seconds, pace, timeline)
        if self.experiment is not None and timeline is not None:
            self.experiment.ended(timeline, status, seconds, pace)

    async def stop(self, patience: float, quiet: Callable[[], bool] = lambda: True) -> None:
        """Be ready no more; give the requests that run, and those that still come until it is `quiet`, `patience`
        seconds, then end them with an error that their clients see. Returns when none is left, or only such whose
        client does not read."""
        self._leaving = True
        idle = await self._idle_within(patience, quiet)
        self._stopping = True
        if idle:
            return
        for answer in self._running:
            answer.fail(Cancelled("the frontend stops", why=f"the answer was not complete within {patience:g} s"))
        if not await self._idle_within(FAREWELL):
            log.warning("%d clients did not take the end of their answers", len(self._running))

    async def _idle_within(self, seconds: float, quiet: Callable[[], bool] = lambda: True) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
                while not quiet():
                    await asyncio.sleep(_LOOK_EVERY)
                    await self._idle.wait()
        except TimeoutError:
            return False
        return True
