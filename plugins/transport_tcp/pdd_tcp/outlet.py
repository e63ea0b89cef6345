"""One connection on which blocks leave."""

from __future__ import annotations

import logging
import select
import socket
import threading
from collections import deque
from typing import NamedTuple, Protocol

from pdd_runtime.clock import now
from pdd_tcp.link import Link
from pdd_tcp.session import Block, Piece, Session
from pdd_tcp.sockets import Cut, Waiter, broken, shut

log = logging.getLogger(__name__)


class Arrival(NamedTuple):
    """What is under way on an emulated line."""

    at: float
    item: Piece | bytes
    nbytes: int


class Supply(Protocol):
    """Where an outlet has its frames from."""

    changed: threading.Condition
    """Over the link's lock; notified when there may be something to send."""

    @property
    def waiting(self) -> bool:
        """Under the lock: `pick` would give something."""
        ...

    def pick(self) -> Piece | Block | None:
        """Under the lock: a frame, or a block that is to be encoded before it has any."""
        ...

    def encoded(self, block: Block) -> None:
        """It has been, or its fetch has ended meanwhile."""
        ...

    def written(self, outlet: Outlet, piece: Piece) -> None:
        """Its bytes have left, or its fetch has ended meanwhile."""
        ...

    def roomy(self) -> None:
        """Under the lock: the line may go on."""
        ...

    def lost(self, outlet: Outlet) -> None:
        """The connection is gone, and what was handed to this outlet with it. Idempotent."""
        ...


class Outlet:
    """A thread that writes frames to a socket: on a link those that it picks when there is room, on an emulated line
    those that arrive."""

    def __init__(
        self,
        sock: socket.socket,
        link: Link,
        supply: Supply,
        *,
        beat: bytes,
        period: float,
        window: int,
        index: int,
        name: str,
    ) -> None:
        """A `beat` is sent where nothing else was for `period` seconds. `window`: bytes under way on an emulated line
        at most."""
        self._sock, self._link, self._supply, self._beat, self._period = sock, link, supply, beat, period
        self._window = window
        self.index = index
        """The receiver's name for the connection."""
        self._room = Waiter(sock, select.POLLOUT)
        # Under the link's lock:
        self.control: deque[bytes] = deque()
        """Frames without a block, which go before others."""
        self.arrivals: deque[Arrival] = deque()
        self.under_way = 0
        """Bytes of these."""
        self.held_until = 0.0
        """When the receiver last let the line go on. It has no claim on the time before."""
        self._over = False
        self._busy = False
        # Under this lock a block's memory is read:
        self._reading = threading.Lock()
        self._session: Session | None = None
        """Whose memory it is."""
        self._left: list[memoryview] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Break the connection."""
        with self._link.lock:
            self._over = True
            self._supply.changed.notify_all()
        shut(self._sock)

    def stop(self) -> None:
        """Break the connection, and return when its thread has ended, if it was started."""
        self.end()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def open(self) -> bool:
        """Under the link's lock: it takes more from the line."""
        return self.under_way < self._window

    def enter(self, arrival: Arrival) -> None:
        """Under the link's lock: this is under way."""
        self.arrivals.append(arrival)
        self.under_way += arrival.nbytes
        if len(self.arrivals) == 1:
            self._supply.changed.notify_all()

    @property
    def idle(self) -> bool:
        """Under the link's lock: nothing is on its way."""
        return not (self.control or self.arrivals or self._busy)

    def forget(self, session: Session) -> None:
        """Under the link's lock: send no more of `session` that is under way on the line."""
        held = not self.open
        kept = [each for each in self.arrivals if not (isinstance(each.item, Piece) and each.item.session is session)]
        self.under_way -= sum(each.nbytes for each in self.arrivals) - sum(each.nbytes for each in kept)
        self.arrivals = deque(kept)
        self._let_go(held)

    def detach(self, session: Session) -> None:
        """Return when nothing here reads memory of `session` any more: a frame that is half sent goes on from a copy.
        Not under the link's lock."""
        with self._reading:
            if self._session is session:
                self._left = [memoryview(bytes(part)) for part in self._left]
                self._session = None

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Cut as cut:
            log.debug("pdd-tcp: %s", cut)
        except Exception:
            log.exception("pdd-tcp: an outlet failed")
        finally:
            self.end()
            self._supply.lost(self)

    def _turn(self) -> bool:
        # What is sent is chosen when there is room for it, by what is known by then.
        if not self._room.wait(self._link.io_timeout):
            raise Cut("the peer took nothing for too long")
        with self._link.lock:
            self._busy = False
            waited = not self._due() and self._wait()
            if self._over:
                return False
            item = self._next()
            if item is None and waited:
                item = self._beat
            if isinstance(item, Piece):
                self._session = item.block.session
            elif isinstance(item, Block):
                self._session = item.session
            self._busy = item is not None
        if isinstance(item, Piece):
            self._send(item)
            self._supply.written(self, item)
        elif isinstance(item, Block):
            with self._reading:
                if self._session is not None:
                    item.encode()
                self._session = None
            self._supply.encoded(item)
        elif item is not None:
            self._send(item)
        return True

    def _wait(self) -> bool:
        """Until there is something to do; True where that took so long that a beat is due."""
        until = now() + self._period
        while not (self._over or self._due()):
            left = until - now()
            if left <= 0.0:
                return True
            if self.arrivals:
                left = min(left, self.arrivals[0].at - now())
            self._supply.changed.wait(max(0.0, left))
        return False

    def _due(self) -> bool:
        if self._link.line is not None:
            return bool(self.arrivals) and self.arrivals[0].at <= now()
        return bool(self.control) or self._supply.waiting

    def _next(self) -> Piece | Block | bytes | None:
        if self._link.line is None:
            return self.control.popleft() if self.control else self._supply.pick()
        if not self._due():
            return None
        arrival, held = self.arrivals.popleft(), not self.open
        self.under_way -= arrival.nbytes
        self._let_go(held)
        return arrival.item

    def _let_go(self, held: bool) -> None:
        if held and self.open:
            self.held_until = now()
            self._supply.roomy()

    def _send(self, item: Piece | bytes) -> None:
        with self._reading:
            if isinstance(item, bytes):
                self._left = [memoryview(item)]
            elif self._session is not None:
                self._left = [memoryview(item.header or item.seal()), item.view]
            sent = self._push()
        while not sent:
            if not self._room.wait(self._link.io_timeout):
                raise Cut("the peer took nothing for too long")
            with self._reading:
                sent = self._push()

    def _push(self) -> bool:
        """As much as there is room for; True when all of it has left."""
        while self._left:
            try:
                sent = self._sock.sendmsg(self._left)
            except BlockingIOError:
                return False
            except OSError as error:
                raise broken(error) from error
            while self._left and sent >= len(self._left[0]):
                sent -= len(self._left.pop(0))
            if sent:
                self._left[0] = self._left[0][sent:]
        self._session = None
        return True
