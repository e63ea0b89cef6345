"""One receiver on the sending side: its connections, and the fetches that they share."""

from __future__ import annotations

import functools
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable

from pdd_runtime.clock import now
from pdd_runtime.errors import DeadlineExceeded, PddError, RemoteError, TransferError
from pdd_runtime.plugins.transport import BlockSource, Ready
from pdd_tcp import wire
from pdd_tcp.feeders import Feeders
from pdd_tcp.link import Link
from pdd_tcp.outlet import Outlet
from pdd_tcp.pacing import Entrance
from pdd_tcp.session import Block, Piece, Session

log = logging.getLogger(__name__)
SESSIONS = 4096
"""Fetches of one receiver at once."""


class Channel:
    """The connections of one receiver, all over one link. A frame goes on whichever has room first; which one is next
    is the link's scheduler's to say."""

    def __init__(
        self,
        hello: wire.Hello,
        link: Link,
        entrance: Entrance | None,
        source: BlockSource,
        feeders: Feeders,
        gone: Callable[[bytes], None],
    ) -> None:
        """`gone` is called with its name when the last connection has been lost."""
        self.name, self.streams = hello.channel, link.streams(hello.streams)
        self.frame = link.frame(self.streams)
        self.link, self._entrance, self._source, self._feeders, self._gone = link, entrance, source, feeders, gone
        self._period = hello.beat
        self.changed = threading.Condition(link.lock)
        # Under the link's lock:
        self.sessions: dict[int, Session] = {}
        self.outlets: list[Outlet] = []
        self._cancelled: deque[int] = deque(maxlen=1024)
        """Fetches that were cancelled before they were known: two connections may overtake each other."""
        self._over = False

    # Connections

    def open(self, sock: socket.socket, index: int, name: str) -> Outlet | None:
        """One connection more, to be started; None where the channel has ended, or has more than it should."""
        beat = wire.pack_frame(wire.BEAT, wire.Binding(self.name).session)
        window = 0 if self._entrance is None else self._entrance.window
        outlet = Outlet(sock, self.link, self, beat=beat, period=self._period, window=window, index=index, name=name)
        with self.link.lock:
            if self._over or len(self.outlets) >= 2 * self.streams:
                return None
            self.outlets.append(outlet)
            if self._entrance is not None and self not in self._entrance.lanes:
                self._entrance.lanes.append(self)
        self.link.opened(sock, self.streams)
        return outlet

    def lost(self, outlet: Outlet) -> None:
        with self.link.lock:
            if outlet in self.outlets:
                self.outlets.remove(outlet)
            last = not self.outlets and not self._over
            if last:
                self._over = True
                if self._entrance is not None:
                    self._entrance.lanes.remove(self)
            sessions = list(self.sessions.values()) if last else []
        for session in sessions:
            self._close(session)
        if last:
            self._gone(self.name)

    def end(self) -> None:
        """Break all connections."""
        with self.link.lock:
            outlets = list(self.outlets)
        for outlet in outlets:
            outlet.end()

    @property
    def quiet(self) -> bool:
        """Nothing is to be sent."""
        with self.link.lock:
            return not self.sessions and all(outlet.idle for outlet in self.outlets)

    # Fetches

    def receive(self, message: wire.Subscribe | wire.Cancel) -> None:
        """Do as the receiver says, when its message would have crossed an emulated line: its own side cannot delay it,
        as it is not told where this one is."""
        handle = functools.partial(self._handle, message)
        if self._entrance is None:
            handle()
        else:
            self._entrance.after_delay(handle)

    def _handle(self, message: wire.Subscribe | wire.Cancel) -> None:
        if isinstance(message, wire.Cancel):
            self._cancel(message.number)
        elif message.number in self.sessions:
            log.warning("pdd-tcp: a receiver in %s has two fetches of number %d", self.link.cluster, message.number)
            self.end()
        else:
            self._subscribe(message)

    def _subscribe(self, asked: wire.Subscribe) -> None:
        """Begin to send, or say why not."""
        with self.link.lock:
            lost = [each for each in self.outlets if each.index < asked.opened and each.index not in asked.alive]
        for outlet in lost:
            outlet.end()
            self.lost(outlet)
        try:
            subscription = asked.subscription(self.link.cluster, self.frame)
            if len(self.sessions) >= SESSIONS:
                raise TransferError(f"a receiver may have {SESSIONS} fetches at once", where=asked.request_id)
            feed = self._source.open(subscription)
        except Exception as error:
            self._tell(asked.number, asked.request_id, error)
            return
        session = Session(self.name, asked, subscription, feed, self.frame, self.link.encoder(asked))
        with self.link.lock:
            wanted = not self._over and asked.number not in self._cancelled
            if wanted:
                self.sessions[asked.number] = session
                session.hold()
        if wanted:
            self._feeders.add(functools.partial(self._pull, session))
        else:
            feed.close()

    def _cancel(self, number: int) -> None:
        """Send no more of a fetch, and say on each connection when its last frame is through."""
        with self.link.lock:
            session = self.sessions.get(number)
            if session is None:
                self._cancelled.append(number)
        if session is not None:
            self._close(session)
        with self.link.lock:
            for outlet in self.outlets:
                outlet.control.append(wire.pack_frame(wire.ENDED, 0, fetch=number))
            self.wake(len(self.outlets))

    def give_up(self, error: Callable[[Session], PddError | None]) -> None:
        """End each session for which there is an error, and tell the receiver."""
        with self.link.lock:
            sessions = list(self.sessions.values())
        for session in sessions:
            why = error(session)
            if why is not None:
                self._fail(session, why)

    def expire(self) -> None:
        """End those whose deadline has passed."""
        time = now()
        self.give_up(
            lambda session: (
                DeadlineExceeded("the deadline of a KV subscription", where=session.request_id)
                if session.until < time
                else None
            )
        )

    # What an outlet sends

    @property
    def waiting(self) -> bool:
        for session in self.sessions.values():  # noqa: SIM110 - asked for every frame, and twice as fast
            if session.blocks:
                return True
        return False

    def pick(self) -> Piece | Block | None:
        return self.link.pick(self.sessions.values())

    def encoded(self, block: Block) -> None:
        with self.link.lock:
            self.link.encoded(block)
            self.wake(len(block.parts))

    def written(self, outlet: Outlet, piece: Piece) -> None:
        session = piece.session
        with self.link.lock:
            if session.closed:
                return
            whole = session.written(piece)
            self.link.meter.left(len(piece.view), now())
            end = b"" if self._entrance is not None else session.sealed(piece)
            if end:
                outlet.control.append(end)
            over = session.over
        if whole:
            session.feed.sent(piece.block.index)
        if over:
            self._close(session)

    def roomy(self) -> None:
        if self._entrance is not None:
            self._entrance.changed.notify()

    def wake(self, frames: int) -> None:
        """Under the lock: there are so many more to send."""
        if self._entrance is not None:
            self._entrance.changed.notify()
        else:
            self.changed.notify(frames)

    # In feeders' threads

    def _pull(self, session: Session, seconds: float) -> bool:
        try:
            while session.unfed and not session.closed:
                item = session.feed.next(seconds)
                if item is None:
                    return not session.closed or self._release(session)
                with self.link.lock:
                    if session.closed:
                        break
                    if isinstance(item, Ready):
                        frames, nbytes = session.fed(item)
                        self.link.made(nbytes)
                    else:
                        frames = 1
                        self._say(session.gone(item.index) + session.end())
                    over = session.over
                    self.wake(frames)
                if over:
                    self._close(session)
        except Exception as error:
            self._fail(session, error)
        return self._release(session)

    # Ends

    def _fail(self, session: Session, error: Exception) -> None:
        if self._close(session):
            self._tell(session.number, session.request_id, error)

    def _close(self, session: Session) -> bool:
        """Forget it, and drop its pins as soon as nothing reads their memory. False where that was done before."""
        with self.link.lock:
            if session.closed:
                return False
            session.closed = True
            del self.sessions[session.number]
            if session.queued:
                self.link.meter.dropped(session.queued, now())
            outlets = list(self.outlets)
            for outlet in outlets:
                outlet.forget(session)
        for outlet in outlets:
            outlet.detach(session)
        self._release(session)
        return True

    def _release(self, session: Session) -> bool:
        """Always False: nothing more is to come."""
        with self.link.lock:
            last = session.release()
        if last:
            session.feed.close()
        return False

    def _tell(self, number: int, request_id: str, error: Exception) -> None:
        if not isinstance(error, PddError):
            log.error("pdd-tcp: request %s failed", request_id, exc_info=error)
            error = RemoteError(f"{type(error).__name__}: {error}")
        else:
            log.info("pdd-tcp: request %s: %s", request_id, error)
        payload = wire.pack_error(error)
        bind = wire.Binding(self.name, number, request_id).session
        with self.link.lock:
            self._say(wire.pack_frame(wire.ERROR, bind, fetch=number, payload=payload) + payload)
            self.wake(1)

    def _say(self, frame: bytes) -> None:
        if self.outlets:
            self.outlets[0].control.append(frame)
