"""The thread in which everything about one NIXL agent happens."""

from __future__ import annotations

import threading
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from pdd_rdma.library import Agent, MakeAgent

T = TypeVar("T")
Job = tuple[Callable[[Agent], Any], Future[Any]]


class NixlError(Exception):
    """NIXL would not do what it was asked."""


class AgentThread(ABC):
    """An agent is made when first needed, is only ever touched in this thread, and is gone when `close` returns.

    UCX moves nothing by itself: data that its software carries (TCP, shared memory without the kernel's help) moves
    only while the agent is called, on both sides. So `step` is called again and again, at the pace it asks for.
    """

    def __init__(self, make: MakeAgent, name: str) -> None:
        """`name` of the thread; the agent's is new each time, so that no peer mistakes one for the one before."""
        self._make, self._name = make, name
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._thread: threading.Thread | None = None
        self._closing = self._woken = False
        self._ends: list[Future[None]] = []
        """Who waits for the agent to be destroyed."""
        self._agent: Agent | None = None

    def submit(self, job: Callable[[Agent], T]) -> Future[T]:
        """Run `job` in the thread. Its future raises `NixlError` for whatever NIXL raised, and when closed."""
        future: Future[T] = Future()
        with self._changed:
            if self._closing:
                future.set_exception(NixlError("the transport is closed"))
                return future
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._jobs.append((job, future))
            self._changed.notify()
        return future

    def rebuild(self) -> Future[None]:
        """Destroy the agent, with all its connections and whatever is on its way: when the future is done, no byte
        moves any more. The next job gets a new one."""
        future: Future[None] = Future()
        with self._changed:
            if self._closing or self._thread is None:
                future.set_result(None)
            else:
                self._ends.append(future)
                self._changed.notify()
        return future

    def close(self) -> None:
        """Blocks until the agent and its thread are gone. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def wake(self) -> None:
        """Call `step` now, and do not sleep before: what it goes by has changed."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    @abstractmethod
    def step(self, agent: Agent) -> float | None:
        """Let the agent go on; seconds until the next call, or None: none before there is a job."""

    @abstractmethod
    def leave(self, agent: Agent) -> Sequence[Future[None]]:
        """Release all that the agent has given: it is about to be destroyed. Returns what fails with it."""

    def _run(self) -> None:
        pause: float | None = None
        while True:
            with self._changed:
                if not (self._jobs or self._ends or self._closing or self._woken):
                    self._changed.wait(pause)
                self._woken = False
                jobs, self._jobs = self._jobs, deque()
                ends, self._ends = self._ends, []
                closing = self._closing
            while jobs:
                self._do(*jobs.popleft())
            if (closing or ends) and self._agent is not None:
                failed = self.leave(self._agent)
                self._agent = None
                for future in failed:
                    future.set_exception(NixlError("the agent was destroyed"))
            for future in ends:
                future.set_result(None)
            if closing:
                return
            pause = self.step(self._agent) if self._agent is not None else None

    def _do(self, job: Callable[[Agent], T], future: Future[T]) -> None:
        try:
            if self._agent is None:
                self._agent = self._make(f"{self._name}-{uuid.uuid4().hex}")
            future.set_result(job(self._agent))
        except Exception as error:
            # Made anew: a traceback would hold the agent, and with it its sockets and threads, beyond its end.
            future.set_exception(NixlError(_words(error)))


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, NixlError) else f"{type(error).__name__}: {' '.join(str(error).split())}"


class Backoff:
    """How long to sleep between looks at something that comes soon, or late: the processor is others' as well."""

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self._next = first

    def reset(self) -> None:
        self._next = self._first

    def pause(self) -> float:
        """Seconds; a little more each time."""
        pause, self._next = self._next, min(self._next * 1.5, self._most)
        return pause
