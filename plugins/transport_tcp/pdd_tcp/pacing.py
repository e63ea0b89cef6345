"""How frames leave: straight into the socket, or as if they crossed an emulated line."""

from __future__ import annotations

import dataclasses
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
SLACK_SECONDS = 0.05
"""How far threads may run ahead of an emulated line, so that one that wakes late on a busy machine costs no rate."""


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


@dataclasses.dataclass(slots=True)
class Chunk:
    """What enters a line at once."""

    views: list[memoryview]
    nbytes: int
    ready_at: float
    """Since when it could have entered."""
    then: Callable[[], None] | None = None
    arrives_at: float = 0.0


class Entrance:
    """The one place where this process's bulk enters a line: a thread that lets in chunk after chunk, each when the
    one before has left, and the streams in turn. So a message that shares the line waits for one chunk at most,
    however many streams are busy."""

    def __init__(self, line: Line, name: str) -> None:
        self.line = line
        self.chunk = max(SMALLEST_CHUNK, min(LARGEST_CHUNK, int(line.bandwidth / 8 * CHUNK_SECONDS)))
        """Bytes: what the line carries in 5 ms, within bounds."""
        self.slack = int(line.bandwidth / 8 * SLACK_SECONDS) + 4 * self.chunk
        self.window = int(line.bandwidth / 8 * (line.delay + line.jitter)) + self.slack
        """Bytes under way: what a busy line holds, and the slack."""
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._turns: deque[LineOutlet] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def queue(self, outlet: LineOutlet) -> None:
        """Under the lock: `outlet` has a chunk that may enter, and is not in the queue."""
        self._turns.append(outlet)
        self._changed.notify()

    def close(self) -> None:
        with self.lock:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        free_at = 0.0
        while True:
            time.sleep(max(0.0, free_at - now()))
            with self.lock:
                self._changed.wait_for(lambda: self._closed or self._turns)
                if self._closed:
                    return
                outlet = self._turns.popleft()
                if not outlet.waiting:
                    continue  # Its stream has ended.
                chunk = outlet.waiting[0]
            # It enters at the time when it could have: otherwise each late wake-up would take away from the rate.
            free_at, chunk.arrives_at = self.line.reserve(chunk.nbytes, max(chunk.ready_at, free_at))
            with self.lock:
                outlet.entered()


class LineOutlet:
    """One stream on an emulated line. A thread of its own lets each chunk out when it arrives, so that a long line is
    full however long its delay."""

    def __init__(self, sock: socket.socket, entrance: Entrance, name: str) -> None:
        self._sock, self._entrance = sock, entrance
        self._room = threading.Condition(entrance.lock)
        """For the sender's thread: it may send, or all is delivered."""
        self._arrivals = threading.Condition(entrance.lock)
        """For the delivering thread: something is under way, or all is over."""
        self.waiting: deque[Chunk] = deque()
        self._under_way: deque[Chunk] = deque()
        self._waiting_bytes = self._under_way_bytes = 0
        self._queued = self._closed = False
        self._cut: Cut | None = None
        self._thread = threading.Thread(target=self._deliver, name=name, daemon=True)
        self._thread.start()

    def send(self, parts: Parts, then: Callable[[], None] | None = None) -> None:
        with self._room:
            self._room.wait_for(lambda: self._cut or self._waiting_bytes < self._entrance.slack)
            if self._cut:
                raise self._cut
            chunks = _chunks(parts, self._entrance.chunk, now())
            chunks[-1].then = then
            self.waiting.extend(chunks)
            self._waiting_bytes += sum(chunk.nbytes for chunk in chunks)
            self._queue()

    def close(self, *, flush: bool) -> None:
        with self._room:
            if flush:
                self._room.wait_for(lambda: self._cut or not (self.waiting or self._under_way))
            self._closed = True
            self.waiting.clear()
            self._arrivals.notify()
        self._thread.join()

    def entered(self) -> None:
        """Under the lock: the line has taken the first waiting chunk."""
        if not self.waiting:
            return  # The stream has ended meanwhile.
        chunk = self.waiting.popleft()
        self._under_way.append(chunk)
        self._waiting_bytes -= chunk.nbytes
        self._under_way_bytes += chunk.nbytes
        self._queued = False
        self._queue()
        if len(self._under_way) == 1:
            self._arrivals.notify()
        if self._waiting_bytes < self._entrance.slack:
            self._room.notify()

    def _queue(self) -> None:
        if self.waiting and not self._queued and self._under_way_bytes < self._entrance.window:
            self._queued = True
            self._entrance.queue(self)

    def _deliver(self) -> None:
        try:
            while chunk := self._next_arrival():
                send_all(self._sock, chunk.views)
                if chunk.then is not None:
                    chunk.then()
                self._arrived(chunk)
        except Cut as cut:
            with self._room:
                self._cut = cut
                self.waiting.clear()
                self._room.notify()

    def _next_arrival(self) -> Chunk | None:
        with self._arrivals:
            self._arrivals.wait_for(lambda: self._closed or self._under_way)
            while not self._closed and (left := self._under_way[0].arrives_at - now()) > 0.0:
                self._arrivals.wait(left)
            return None if self._closed else self._under_way[0]

    def _arrived(self, chunk: Chunk) -> None:
        with self._room:
            self._under_way.popleft()
            full = self._under_way_bytes >= self._entrance.window
            self._under_way_bytes -= chunk.nbytes
            if full and self.waiting:
                # The receiver held it up, not the line: it has no claim on the time before.
                self.waiting[0].ready_at = now()
            self._queue()
            if not self._under_way:
                self._room.notify()


def _chunks(parts: Parts, size: int, ready_at: float) -> list[Chunk]:
    """`parts` cut into pieces of `size` bytes."""
    chunks: list[Chunk] = []
    room = 0
    for part in parts:
        rest = memoryview(part)
        while rest:
            if not room:
                chunks.append(Chunk([], 0, ready_at))
                room = size
            view, rest = rest[:room], rest[room:]
            chunks[-1].views.append(view)
            chunks[-1].nbytes += len(view)
            room -= len(view)
    return chunks
