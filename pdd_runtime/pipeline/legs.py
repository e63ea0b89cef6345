"""A leg of a session: one stream on one worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Self, TypeVar

from pdd_runtime.errors import ConnectionLost, DeadlineExceeded, EngineError, PddError
from pdd_runtime.pipeline.peers import Peer
from pdd_runtime.pipeline.recovery import failed_at, worker_lost
from pdd_runtime.rpc import RpcStream

E = TypeVar("E")


class Leg(Generic[E]):
    """Iterates over a stream's events, with a deadline for each and errors that name the worker.

    A leg that is open holds what its request holds on the worker; closing it cancels the request there.
    """

    def __init__(self, peer: Peer, doing: str, stream: RpcStream[E], patience: float) -> None:
        self.peer = peer
        self.doing = doing
        """What goes on there, for messages: "decoding"."""
        self.patience = patience
        """Seconds to wait for the next event."""
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._due: float | None = None
        """When the event that is waited for must be there; None: nobody waits."""
        self._timer: asyncio.TimerHandle | None = None

    async def open(self) -> None:
        """Send the request; without it the first event asked for does that."""
        try:
            await self._stream.__aenter__()
        except ConnectionLost as error:
            raise worker_lost(self.peer, self.doing, error.what) from error

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> E:
        with self._waiting():
            return await self._stream.__anext__()

    async def feed(self, put: Callable[[E], bool]) -> bool:
        """Give every event to `put` in the step in which it comes, until that returns True; False: the stream ended."""

        def heard(event: E) -> bool:
            self._due = self._loop.time() + self.patience
            return put(event)

        with self._waiting():
            return await self._stream.feed(heard)

    def fail(self, error: PddError) -> None:
        """Stop it; who reads gets `error`. Nothing happens where it has ended."""
        self._stream.fail(error)

    def ended(self, without: str) -> EngineError:
        """The error of a stream that ended without what it should have brought."""
        what = f"{self.doing}: the stream ended without {without}"
        return failed_at(self.peer, EngineError(what, where=f"worker {self.peer}"))

    async def close(self) -> None:
        """Idempotent; waits for nothing that the worker would have to say."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        await self._stream.aclose()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._due = due = self._loop.time() + self.patience
        if self._timer is None or due < self._timer.when():
            self._watch(due)
        try:
            yield
        except ConnectionLost as error:
            raise worker_lost(self.peer, self.doing, error.what) from error
        except PddError as error:
            failed_at(self.peer, error)
            raise
        finally:
            self._due = None

    def _watch(self, due: float) -> None:
        """Look at `due` whether the leg still waits. One timer for many events: one each costs more than the event."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._due is None:
            return
        if self._due > self._loop.time():
            self._watch(self._due)
            return
        self.fail(DeadlineExceeded(f"{self.doing} said nothing for {self.patience:.3g} s", where=f"worker {self.peer}"))
