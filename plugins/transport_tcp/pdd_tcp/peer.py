"""The receiving side's kept connections to one sender, and the fetches that share them."""

from __future__ import annotations

import functools
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable

import msgspec

from pdd_runtime.clock import now
from pdd_runtime.errors import PddError
from pdd_runtime.plugins.transport import LinkFacts, TransportContext
from pdd_tcp import wire
from pdd_tcp.config import TcpConfig
from pdd_tcp.incoming import Incoming
from pdd_tcp.inlet import Inlet
from pdd_tcp.sockets import Cut, Damaged

log = logging.getLogger(__name__)

BYTES_PER_STREAM = 1 << 20
"""Inside a cluster another connection is opened for each MiB that is asked for at once."""


class Peer:
    """A thread that opens connections, subscribes and cancels, and a thread for each connection. When a connection is
    lost and others are left, the sender is asked to end each session on these; behind the last frames of the old one,
    what is missing is asked for in a new one."""

    def __init__(
        self, address: tuple[str, int], cluster: str, context: TransportContext, config: TcpConfig, name: str
    ) -> None:
        """`cluster`: where the receiver says it is."""
        self._address, self._cluster, self._context, self._config = address, cluster, context, config
        self._name = name
        self._changed = threading.Condition()
        # Below: under its lock.
        self._fetches: set[Incoming] = set()
        self._to_subscribe: deque[Incoming] = deque()
        self._cancels: deque[wire.Cancel] = deque()
        self._active: dict[int, Incoming] = {}
        """Sessions by number."""
        self._settling: dict[int, set[Inlet]] = {}
        """Sessions that end, and the connections on which some of their frames may still come."""
        self._dropped: set[int] = set()
        """Sessions of fetches that are over; the sender has not said yet that it knows."""
        self._next = 1
        self._channel = self._replaces = b""
        self._live: list[Inlet] = []
        self._opening: set[Inlet] = set()
        self._threads: list[Inlet] = []
        self._streams = 1
        self._frame = 0
        self._link: LinkFacts | None = None
        self._retry_at = 0.0
        self._delay = config.retry_delay
        self._idle_since = now()
        self._retired = self._closed = False
        self._opened = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # On the event loop

    @property
    def idle(self) -> bool:
        """No fetch uses it."""
        return not self._fetches

    @property
    def closed(self) -> bool:
        """It takes no fetch any more."""
        return self._closed

    @property
    def alive(self) -> bool:
        """It has threads."""
        return self._thread.is_alive()

    def add(self, fetch: Incoming) -> bool:
        """Run a fetch; False where this peer has been closed."""
        with self._changed:
            if self._closed:
                return False
            self._fetches.add(fetch)
            self._to_subscribe.append(fetch)
            self._changed.notify()
            return True

    def drop(self, fetch: Incoming) -> None:
        """A fetch that is over. When this returns, its memory is not touched any more."""
        with self._changed:
            self._fetches.discard(fetch)
            if fetch in self._to_subscribe:
                self._to_subscribe.remove(fetch)
            for number in [number for number, each in self._active.items() if each is fetch]:
                del self._active[number]
                if self._settling.pop(number, None) is None and fetch.cut_short:
                    self._cancels.append(wire.Cancel(number))
                if fetch.cut_short:
                    self._dropped.add(number)
            inlets = list(self._live)
            self._idle_since = now()
            self._changed.notify()
        for inlet in inlets:
            inlet.release(fetch)

    def retire(self) -> None:
        """Close as soon as it is idle."""
        with self._changed:
            self._retired = True
            self._changed.notify()

    def close(self) -> None:
        """Close all connections, and return when all threads have ended. Its fetches are over. Blocks."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    # In its thread

    def _run(self) -> None:
        try:
            while (job := self._job()) is not None:
                job()
        except Exception as error:
            self._broken(error)
        with self._changed:
            threads = [inlet for inlet in self._threads if inlet.started]
        for inlet in threads:
            inlet.end()
        for inlet in threads:
            inlet.join()

    def _broken(self, error: Exception) -> None:
        """Without this thread its fetches would wait for their deadlines; the next ones get a peer of their own."""
        log.error("pdd-tcp: the connections to %s:%d are given up", *self._address, exc_info=error)
        with self._changed:
            self._closed = True
            fetches = list(self._fetches)
        for fetch in fetches:
            fetch.stop(f"{type(error).__name__}: {error}")

    def _job(self) -> Callable[[], None] | None:
        """What to do next, waiting for it; None at the end."""
        with self._changed:
            while True:
                until = [] if self._fetches else [0.0 if self._retired else self._idle_since + self._config.keep]
                if self._closed or (until and until[0] <= now() and not self._cancels):
                    self._closed = True
                    return None
                if self._live:
                    if self._cancels:
                        return functools.partial(self._live[0].send, self._cancels.popleft())
                    if self._to_subscribe:
                        return functools.partial(self._subscribe, self._live[0], self._to_subscribe.popleft())
                elif not self._opening:
                    self._cancels.clear()
                    self._dropped.clear()
                if self._lacking():
                    if self._retry_at <= now():
                        return self._open().start
                    until.append(self._retry_at)
                self._changed.wait(max(0.0, min(until) - now()) if until else None)

    def _lacking(self) -> bool:
        """Whether to open one more connection."""
        if not self._fetches:
            return False
        if not self._live:
            return not self._opening
        count = len(self._live) + len(self._opening)
        if count >= self._streams or self._link is not None:
            return count < self._streams
        return count < 1 + sum(fetch.size for fetch in self._fetches) // BYTES_PER_STREAM

    def _open(self) -> Inlet:
        join = bool(self._live)
        if not join:
            self._channel = secrets.token_bytes(wire.NAME_BYTES)
        hello = wire.Hello(
            channel=self._channel,
            join=join,
            replaces=b"" if join else self._replaces,
            cluster=self._cluster,
            secret=self._context.greeting.secret,
            beat=self._config.io_timeout / 3,
            streams=self._config.streams,
            index=self._opened,
        )
        self._opened += 1
        name = f"{self._name}-{self._opened}"
        inlet = Inlet(self._address, hello, self._config.io_timeout, self, name, self._context.tls)
        self._opening.add(inlet)
        self._threads.append(inlet)
        return inlet

    def _subscribe(self, inlet: Inlet, fetch: Incoming) -> None:
        with self._changed:
            if fetch not in self._fetches:
                return
            if inlet not in self._live:
                self._to_subscribe.append(fetch)
                return
            number, self._next = self._next, self._next + 1
            alive = tuple(each.hello.index for each in (*self._live, *self._opening))
            message = msgspec.structs.replace(
                fetch.subscribe(self._channel, number, self._frame), opened=self._opened, alive=alive
            )
            self._active[number] = fetch
        inlet.send(message)

    # In connections' threads

    def joined(self, inlet: Inlet, welcome: wire.Welcome) -> None:
        with self._changed:
            self._opening.discard(inlet)
            if inlet.hello.channel != self._channel or self._closed:
                raise Cut("the channel has ended")
            if not inlet.hello.join:
                self._replaces = self._channel
                self._streams = max(1, min(welcome.streams, self._config.streams))
                self._frame = welcome.frame
                self._link = self._context.link_to(welcome.cluster)
            self._live.append(inlet)
            inlet.tune(self._link, self._streams)
            self._end_sessions()
            self._changed.notify()

    def lost(self, inlet: Inlet, trouble: Cut | PddError) -> None:
        with self._changed:
            self._threads.remove(inlet)
            self._opening.discard(inlet)
            for fetch in self._fetches:
                fetch.trouble = str(trouble)
            if inlet in self._live:
                self._live.remove(inlet)
                for number, fetch in list(self._active.items()):
                    self._on_cut(number, fetch, inlet, trouble)
            elif isinstance(trouble, PddError) and not inlet.hello.join:
                # What refuses the first connection refuses the fetches.
                for fetch in self._fetches:
                    fetch.fail(trouble)
            for number in list(self._settling):
                self._settle(number, inlet)
            self._end_sessions()
            if inlet.landed:
                self._delay = self._config.retry_delay
            self._retry_at = now() + self._delay
            self._delay = min(2 * self._delay, self._config.retry_delay_max)
            self._changed.notify()

    def fetch_of(self, number: int) -> Incoming | None:
        fetch = self._active.get(number)
        if fetch is None and not 0 < number < self._next:
            raise Damaged(f"a frame of a fetch that there was not: {number}")
        return fetch

    def ended(self, inlet: Inlet, number: int) -> None:
        with self._changed:
            self._dropped.discard(number)
            self._settle(number, inlet)

    def _on_cut(self, number: int, fetch: Incoming, inlet: Inlet, trouble: Cut | PddError) -> None:
        """A connection is lost that has carried a session."""
        if isinstance(trouble, Damaged):
            fetch.damaged()
        if number not in self._settling:
            fetch.cut()
            # The sender may have begun to use those that it has been greeted on.
            self._settling[number] = {inlet, *self._live, *(each for each in self._opening if each.greeted)}

    def _end_sessions(self) -> None:
        """Ask the sender to end those that settle, and those of which it may not know that they are over; again after
        each change, as what was said on a connection that is lost may not have come, and the sender may not have known
        one that was just opened."""
        self._cancels.extend(wire.Cancel(number) for number in (*self._settling, *self._dropped))

    def _settle(self, number: int, inlet: Inlet) -> None:
        """On this connection no more comes of a session. On none: what is missing is asked for anew."""
        left = self._settling.get(number)
        if left is None:
            return
        left.discard(inlet)
        if not left:
            del self._settling[number]
            fetch = self._active.pop(number)
            fetch.settle()
            if not fetch.over:
                self._to_subscribe.append(fetch)
                self._changed.notify()
