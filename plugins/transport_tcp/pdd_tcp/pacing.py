"""How frames leave: straight into the socket, or as if they crossed an emulated line."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from pdd_runtime.clock import now
from pdd_runtime.rpc import Line
from pdd_tcp.sockets import Cut, send_all

Parts = Sequence[bytes | memoryview]
LARGEST_CHUNK, SMALLEST_CHUNK = 64 << 10, 4 << 10
CHUNK_SECONDS = 0.005


class Outlet(Protocol):
    """Where one stream's frames go, in order. `send` raises `Cut` when the connection is of no use any more."""

    def send(self, parts: Parts, then: Callable[[], None] | None = None) -> None:
        """Take a frame. `then` is called when its bytes are the kernel's and their memory may change."""
        ...

    def close(self, *, flush: bool) -> None:
        """Return when nothing reads the memory of any frame any more; with `flush`, all of them were sent first."""
        ...


class DirectOutlet:
    """The network as it is."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, parts: Parts, then: Callable[[], None] | None = None) -> None:
        send_all(self._sock, parts)
        if then is not None:
            then()

    def close(self, *, flush: bool) -> None:
        """Nothing is ever held back."""


class Entrance:
    """The one place where this process's bulk enters a line: chunk after chunk, each when the one before has left,
    and streams in turn. So a message that shares the line waits for one chunk, however many streams are busy."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.chunk = max(SMALLEST_CHUNK, min(LARGEST_CHUNK, int(line.bandwidth / 8 * CHUNK_SECONDS)))
        """Bytes: what the line carries in 5 ms, within bounds."""
        self.window = int(line.bandwidth / 8 * (line.delay + line.jitter)) + 4 * self.chunk
        """Bytes under way on a line kept busy, and a few chunks more."""
        self._mutex = threading.Lock()
        self._queue: deque[threading.Lock] = deque()
        self._busy = False
        self._free_at = 0.0

    def enter(self, nbytes: int, ready_at: float) -> float:
        """Wait for the line and enter it. Returns when the bytes arrive.

        The bytes enter at the time when they could have, since `ready_at`, even if this thread woke a little later:
        otherwise each late wake-up would take away from the line's rate.
        """
        self._wait_for_turn()
        try:
            time.sleep(max(0.0, self._free_at - now()))
            self._free_at, arrives_at = self.line.reserve(nbytes, max(ready_at, self._free_at))
            return arrives_at
        finally:
            self._pass_turn()

    def _wait_for_turn(self) -> None:
        with self._mutex:
            if not self._busy:
                self._busy = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._queue.append(mine)
        mine.acquire()

    def _pass_turn(self) -> None:
        with self._mutex:
            if self._queue:
                self._queue.popleft().release()
            else:
                self._busy = False


class LineOutlet:
    """An emulated line. The sender's thread waits for the entrance; a second thread lets each chunk out when it
    arrives, so that a long line is full however long its delay."""

    def __init__(self, sock: socket.socket, entrance: Entrance, name: str) -> None:
        self._sock, self._entrance = sock, entrance
        self._changed = threading.Condition()
        self._under_way: deque[tuple[float, list[memoryview], int, Callable[[], None] | None]] = deque()
        self._bytes = 0
        self._closed = False
        self._cut: Cut | None = None
        self._thread = threading.Thread(target=self._deliver, name=name, daemon=True)
        self._thread.start()

    def send(self, parts: Parts, then: Callable[[], None] | None = None) -> None:
        ready_at = now()
        chunks = _chunks(parts, self._entrance.chunk)
        for position, (chunk, nbytes) in enumerate(chunks):
            with self._changed:
                while self._bytes >= self._entrance.window and not self._cut:
                    self._changed.wait()
                    # The receiver held this chunk up, not the line: it has no claim on the time before.
                    ready_at = now()
                if self._cut:
                    raise self._cut
            arrives_at = self._entrance.enter(nbytes, ready_at)
            with self._changed:
                self._under_way.append((arrives_at, chunk, nbytes, then if position == len(chunks) - 1 else None))
                self._bytes += nbytes
                self._changed.notify_all()

    def close(self, *, flush: bool) -> None:
        with self._changed:
            if flush:
                self._changed.wait_for(lambda: self._cut or not self._under_way)
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _deliver(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._under_way)
                    while not self._closed and self._under_way[0][0] > now():
                        self._changed.wait(self._under_way[0][0] - now())
                    if self._closed:
                        return
                    _, chunk, nbytes, then = self._under_way[0]
                send_all(self._sock, chunk)
                if then is not None:
                    then()
                with self._changed:
                    self._under_way.popleft()
                    self._bytes -= nbytes
                    self._changed.notify_all()
        except Cut as cut:
            with self._changed:
                self._cut = cut
                self._changed.notify_all()


def _chunks(parts: Parts, size: int) -> list[tuple[list[memoryview], int]]:
    """`parts` cut into pieces of `size` bytes, each as views and their length."""
    chunks: list[tuple[list[memoryview], int]] = []
    views: list[memoryview] = []
    room = size
    for part in parts:
        rest = memoryview(part)
        while rest:
            views.append(rest[:room])
            rest = rest[room:]
            room -= len(views[-1])
            if not room:
                chunks.append((views, size))
                views, room = [], size
    if views:
        chunks.append((views, size - room))
    return chunks
