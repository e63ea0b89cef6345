"""An emulated line: what is sent to a cluster enters it frame by frame, and comes out when it arrives."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pdd_runtime.clock import now
from pdd_runtime.rpc import Line
from pdd_tcp.link import LARGEST_CHUNK, Link
from pdd_tcp.outlet import Arrival, Outlet
from pdd_tcp.session import Block, Piece, Session

SLACK_SECONDS = 0.05
"""How far threads may run behind an emulated line, so that one that wakes late on a busy machine costs no rate."""


class Lane(Protocol):
    """One receiver's fetches, all on one connection. Under the link's lock."""

    @property
    def sessions(self) -> Mapping[int, Session]: ...

    @property
    def outlets(self) -> Sequence[Outlet]: ...


class Entrance:
    """The one place where this process's bulk enters a line: a thread that lets in frame after frame, each when the
    one before has left, the one that the link's scheduler picks. So a message that shares the line, and a transfer
    that goes before others, wait for one frame at most, however much else there is to send."""

    def __init__(self, link: Link, line: Line, name: str) -> None:
        self._link, self._line = link, line
        slack = int(line.bandwidth / 8 * SLACK_SECONDS) + 4 * LARGEST_CHUNK
        self.window = int(line.bandwidth / 8 * (line.delay + line.jitter)) + slack
        """Bytes under way to one receiver: what a busy line holds, and the slack."""
        self.lanes: list[Lane] = []
        """Under the link's lock, like all below."""
        self.changed = threading.Condition(link.lock)
        self._inbound: deque[tuple[float, Callable[[], None]]] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def after_delay(self, handle: Callable[[], None]) -> None:
        """Call `handle` when a message that was sent now has crossed the line. In order; it must not block."""
        with self._link.lock:
            self._inbound.append((self._line.comes(now()), handle))
            self.changed.notify()

    def close(self) -> None:
        """Not under the lock."""
        with self._link.lock:
            self._closed = True
            self.changed.notify()
        self._thread.join()

    def _run(self) -> None:
        free_at = 0.0
        while True:
            with self._link.lock:
                handle = self._arrived()
                while handle is None and not self._closed:
                    time = now()
                    if free_at <= time and (entered := self._enter(free_at)) is not None:
                        free_at = entered
                        continue
                    times = [self._inbound[0][0]] if self._inbound else []
                    if free_at > time:
                        times.append(free_at)
                    self.changed.wait(min(times) - time if times else None)
                    handle = self._arrived()
                if self._closed:
                    return
            if handle is not None:
                handle()

    def _arrived(self) -> Callable[[], None] | None:
        if self._inbound and self._inbound[0][0] <= now():
            return self._inbound.popleft()[1]
        return None

    def _enter(self, free_at: float) -> float | None:
        """Let in what comes next; returns when the line is free again, or None where there is nothing."""
        open_ = [(lane, outlet) for lane in self.lanes for outlet in lane.outlets if outlet.open]
        for _, outlet in open_:
            if outlet.control:
                return self._reserve(outlet, outlet.control.popleft(), now())
        to = {session: outlet for lane, outlet in open_ for session in lane.sessions.values()}
        while isinstance(piece := self._link.pick(to), Block):
            piece.encode()
            self._link.encoded(piece)
        if piece is None:
            return None
        outlet = to[piece.session]
        piece.seal()
        end = piece.session.sealed(piece)
        if end:
            outlet.control.append(end)
        # It enters at the time when it could have: otherwise each late wake-up would take away from the rate.
        return self._reserve(outlet, piece, max(free_at, piece.block.since, outlet.held_until))

    def _reserve(self, outlet: Outlet, item: Piece | bytes, at: float) -> float:
        nbytes = len(item) if isinstance(item, bytes) else len(item.header) + len(item.view)
        free_at, arrives_at = self._line.reserve(nbytes, at)
        outlet.enter(Arrival(arrives_at, item, nbytes))
        return free_at
