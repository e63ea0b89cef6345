"""The outbox: frames on their way out of one connection."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from pdd_runtime.clock import now
from pdd_runtime.rpc.frames import Frame, encode
from pdd_runtime.rpc.line import Line

BACKLOG_LIMIT = 4 * 2**20
"""Bytes on an emulated line or waiting for this tick's write, above which `room` makes senders of data wait."""


class Outbox:
    """Frames leave in the order they were sent. All of one event-loop tick leave in one write; on an emulated
    line each leaves when it would have arrived."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self.line: Line | None = None
        """Set once, when the greeting has said where the peer is."""
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._tick: list[bytes] = []
        self._flying: deque[tuple[float, bytes]] = deque()
        self._backlog = 0
        self._paused = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def send(self, frame: Frame) -> None:
        """Never blocks. Raises `RpcError` where the frame is over the limit; then nothing was sent."""
        data = encode(frame)
        if self._closed:
            return
        self._backlog += len(data)
        if self.line is None:
            if not self._tick:
                self._loop.call_soon(self._write_tick)
            self._tick.append(data)
            return
        _, arrives_at = self.line.reserve(len(data), now())
        self._flying.append((arrives_at, data))
        if self._timer is None:
            self._land()

    @property
    def full(self) -> bool:
        """Who has data should wait for `room`. Control frames are small and few: they are sent without asking."""
        return (self._paused or self._backlog > BACKLOG_LIMIT) and not self._closed

    @property
    def unread(self) -> int:
        """Bytes that the peer has not taken."""
        return self._backlog + self._transport.get_write_buffer_size()

    async def room(self) -> None:
        """Return when there is room for data."""
        while self.full:
            waiter = self._loop.create_future()
            self._waiters.append(waiter)
            await waiter

    def pause(self) -> None:
        """The socket takes no more for now."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._wake()

    def finish(self) -> None:
        """Take no more; what was sent still leaves, and then the end of the stream."""
        self._closed = True
        self._end_when_empty()
        self._wake()

    def close(self) -> None:
        """The socket is gone: drop what has not left. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._tick.clear()
        self._flying.clear()
        self._wake()

    def _write_tick(self) -> None:
        if self._tick:
            self._write(self._tick)
            self._tick = []

    def _land(self) -> None:
        time = now()
        due = []
        while self._flying and self._flying[0][0] <= time:
            due.append(self._flying.popleft()[1])
        if due:
            self._write(due)
        self._timer = self._loop.call_later(self._flying[0][0] - time, self._land) if self._flying else None

    def _write(self, parts: list[bytes]) -> None:
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._backlog -= len(data)
        self._transport.write(data)
        self._end_when_empty()
        self._wake()

    def _end_when_empty(self) -> None:
        if self._closed and self._backlog == 0 and not self._transport.is_closing():
            # Where the peer has reset the connection in this very moment, `connection_lost` says so.
            with suppress(OSError):
                self._transport.write_eof()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
