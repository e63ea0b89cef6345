"""The serving side: a listener, its connections, and the channels and links they belong to."""

from __future__ import annotations

import contextlib
import hmac
import logging
import select
import socket
import threading

from pdd_runtime.clock import now
from pdd_runtime.errors import Cancelled, PddError, TransferError
from pdd_runtime.plugins.transport import BlockSource, LinkTelemetry, TransportContext
from pdd_runtime.rpc import SparseLog, Strangers, within_files
from pdd_tcp import wire
from pdd_tcp.channel import Channel
from pdd_tcp.config import TcpConfig
from pdd_tcp.feeders import Feeders
from pdd_tcp.link import Link
from pdd_tcp.pacing import Entrance
from pdd_tcp.secure import SecureSocket
from pdd_tcp.sockets import Cut, Damaged, Left, Waiter, receive_message, send_all, set_up, shake_hands, shut, take_leave

log = logging.getLogger(__name__)
CONNECTIONS = 512
"""At once, or fewer where the process may have few files open; more wait in the kernel's queue."""
STRANGERS = CONNECTIONS // 4
"""Of them, those that have not greeted yet: who has waited longest gives way."""
LONG_MESSAGES = 2
"""At once, so that memory for what is read is bounded: 64 MiB twice, 1 MiB for every other connection."""
LONG_MESSAGE_BYTES = 1 << 20
HANDSHAKE_SECONDS = 5.0
LAST_WORDS_SECONDS = 1.0
TICK_SECONDS = 0.5
"""How soon a deadline is seen to have passed for a fetch whose blocks are all made and do not leave."""
FEEDERS = 4
"""Threads that wait for blocks."""


class Sender:
    """Feeds every receiver that subscribes, from one `BlockSource`."""

    def __init__(self, config: TcpConfig, context: TransportContext) -> None:
        self._config, self._context = config, context
        self._lock = threading.Lock()
        self._closing = threading.Event()
        connections = within_files(CONNECTIONS, 4)
        self._slots = threading.BoundedSemaphore(connections)
        self._strangers: Strangers[socket.socket] = Strangers(max(1, min(STRANGERS, connections // 2)))
        self._refusals = SparseLog(log)
        self._long_messages = threading.BoundedSemaphore(LONG_MESSAGES)
        self._feeders = Feeders(FEEDERS, "pdd-tcp-feed")
        self._links: dict[str, Link] = {}
        self._entrances: dict[str, Entrance] = {}
        self._channels: dict[bytes, Channel] = {}
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._accepting: threading.Thread | None = None
        self._wake: socket.socket | None = None

    def start(self, source: BlockSource, host: str) -> str:
        """Listen on a free port of `host` and return `host:port`. Raises `TransferError`."""
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((host, 0), family=family, backlog=CONNECTIONS)
        except OSError as error:
            raise TransferError(
                f"cannot listen for KV on {host}", why=str(error), fix="give an address of this host"
            ) from error
        port = listener.getsockname()[1]
        self._wake, woken = socket.socketpair()
        self._accepting = threading.Thread(
            target=self._accept, args=(listener, woken, source), name="pdd-tcp-accept", daemon=True
        )
        self._accepting.start()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def telemetry(self) -> tuple[LinkTelemetry, ...]:
        with self._lock:
            links = list(self._links.values())
        return tuple(link.telemetry() for link in links)

    def close(self) -> None:
        """Tell every receiver, end every connection, and return when all threads have ended. Blocks; idempotent."""
        self._closing.set()
        if self._accepting is None or self._wake is None:
            return
        self._wake.close()
        self._accepting.join()
        with self._lock:
            channels, threads = list(self._channels.values()), list(self._connections.values())
        for channel in channels:
            channel.give_up(lambda session: Cancelled("the sender of KV shuts down", where=session.request_id))
        until = now() + LAST_WORDS_SECONDS
        pause = threading.Event()
        while now() < until and not all(channel.quiet for channel in channels):
            pause.wait(0.005)
        with self._lock:
            for sock in self._connections:
                shut(sock)
        for thread in threads:
            thread.join()
        self._feeders.close()
        for entrance in self._entrances.values():
            entrance.close()

    def _accept(self, listener: socket.socket, woken: socket.socket, source: BlockSource) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(woken, select.POLLIN)
        accepted = 0
        with listener, woken:
            while not self._closing.is_set():
                self._expire()
                if not self._slots.acquire(timeout=TICK_SECONDS):
                    if poll.poll(0):
                        self._refusals.warning("pdd-tcp: all connections are in use: others wait for one to end")
                    continue
                ready = poll.poll(TICK_SECONDS * 1000)
                if self._closing.is_set():
                    return
                if not ready:
                    self._slots.release()
                    continue
                accepted += 1
                try:
                    self._begin(*self._taken(listener), source, f"pdd-tcp-send-{accepted}")
                except (OSError, RuntimeError) as error:
                    # A peer that left at once, or no file or thread to be had: later ones are to be served.
                    self._refusals.warning("pdd-tcp: cannot accept: %s", error)
                    self._slots.release()
                    self._closing.wait(0.05)

    def _taken(self, listener: socket.socket) -> tuple[socket.socket, str]:
        sock, address = listener.accept()
        tls = self._context.tls
        peer = f"{address[0]}:{address[1]}"
        return (sock if tls is None else SecureSocket(sock, tls, server=True)), peer

    def _expire(self) -> None:
        with self._lock:
            channels = list(self._channels.values())
        for channel in channels:
            channel.expire()

    def _begin(self, sock: socket.socket, peer: str, source: BlockSource, name: str) -> None:
        thread = threading.Thread(target=self._connection, args=(sock, peer, source, name), name=name, daemon=True)
        with self._lock:
            oldest = self._strangers.come(sock)
            if oldest is not None:
                shut(oldest)
                crowd = self._strangers.most
                self._refusals.warning("pdd-tcp: one is refused: it has not greeted, and %d others have come", crowd)
            # Ended threads are forgotten here rather than by themselves: `close` misses none that way.
            self._connections = {s: t for s, t in self._connections.items() if t.is_alive()}
            self._connections[sock] = thread
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                del self._connections[sock]
                self._strangers.know(sock)
            sock.close()
            raise

    def _connection(self, sock: socket.socket, peer: str, source: BlockSource, name: str) -> None:
        try:
            set_up(sock, self._config.io_timeout)
            self._serve(sock, peer, source, name)
        except (Cut, PddError) as error:
            self._tell(sock, peer, error)
        except Exception:
            log.exception("pdd-tcp: a connection failed")
        finally:
            with self._lock:
                self._strangers.know(sock)
                sock.close()
            self._slots.release()

    def _tell(self, sock: socket.socket, peer: str, error: Cut | PddError) -> None:
        """Why a connection has ended. That one of the graph's leaves, or is lost, is nothing to speak of."""
        with self._lock:
            greeted = sock not in self._strangers
        if self._closing.is_set() or (isinstance(error, Cut) and greeted and not isinstance(error, Damaged)):
            log.debug("pdd-tcp: the connection from %s ended: %s", peer, error)
        elif isinstance(error, Left):
            log.debug("pdd-tcp: %s left without a greeting", peer)
        else:
            self._refusals.warning("pdd-tcp: connection from %s refused: %s", peer, error)

    def _serve(self, sock: socket.socket, peer: str, source: BlockSource, name: str) -> None:
        try:
            if isinstance(sock, SecureSocket):
                self._admit(sock)
            channel, index = self._greet(sock, source)
            outlet = channel.open(sock, index, f"{name}-out")
            if outlet is None:
                raise TransferError("the channel has ended, or has all its connections")
        except PddError as error:
            self._tell(sock, peer, error)
            with contextlib.suppress(Cut):
                send_all(sock, wire.pack(wire.Refuse(wire.short(error))), LAST_WORDS_SECONDS)
            take_leave(sock, LAST_WORDS_SECONDS)
            return
        with self._lock:
            self._strangers.know(sock)
        try:
            send_all(sock, wire.pack(self._welcome(channel)), self._config.io_timeout)
            outlet.start()
            self._listen(sock, channel)
        finally:
            outlet.stop()
            channel.lost(outlet)
            channel.link.closing(sock)

    def _admit(self, sock: SecureSocket) -> None:
        try:
            shake_hands(sock, min(HANDSHAKE_SECONDS, self._config.io_timeout))
        except TransferError as error:
            sock.answer_in_clear(wire.pack(wire.Refuse(wire.short(error))))
            raise

    def _welcome(self, channel: Channel) -> wire.Welcome:
        return wire.Welcome(cluster=self._context.cluster, streams=channel.streams, frame=channel.frame)

    def _listen(self, sock: socket.socket, channel: Channel) -> None:
        """Do as the receiver says until it leaves."""
        waiter = Waiter(sock, select.POLLIN)
        while True:
            waiter.wait(None)
            message = self._read(sock, wire.MESSAGE_LIMIT)
            if isinstance(message, wire.Hello):
                raise wire.refused("a second hello")
            channel.receive(message)

    def _read(self, sock: socket.socket, limit: int) -> wire.Message:
        until = now() + self._config.io_timeout
        return wire.unpack_message(receive_message(sock, limit, until, self._gate))

    def _gate(self, length: int) -> contextlib.AbstractContextManager[object]:
        return self._long_messages if length > LONG_MESSAGE_BYTES else contextlib.nullcontext()

    def _greet(self, sock: socket.socket, source: BlockSource) -> tuple[Channel, int]:
        """The channel of a new connection, and its index. Raises `PddError`: the receiver is refused."""
        hello = self._read(sock, wire.HELLO_LIMIT)
        if not isinstance(hello, wire.Hello):
            raise wire.refused("a connection begins with a hello")
        hello.check()
        if not hmac.compare_digest(hello.secret.encode(), self._context.greeting.secret.encode()):
            raise TransferError("the subscriber does not know this graph's secret")
        if isinstance(sock, SecureSocket) and hello.cluster != sock.sealing.cluster:
            raise TransferError(
                f"the subscriber is not where it says it is: in {hello.cluster!r}",
                why=f"its certificate is of cluster {sock.sealing.cluster!r}",
            )
        with self._lock:
            replaced = self._channels.get(hello.replaces)
            known = self._channels.get(hello.channel)
        if replaced is not None:
            replaced.end()
        if hello.join:
            if known is None:
                raise TransferError("no such channel is served here")
            return known, hello.index
        if self._closing.is_set() or known is not None:
            raise TransferError("the sender of KV shuts down" if known is None else "the channel is served already")
        with self._lock:
            link, entrance = self._link(hello.cluster)
            channel = Channel(hello, link, entrance, source, self._feeders, self._forget)
            return self._channels.setdefault(hello.channel, channel), hello.index

    def _forget(self, channel: bytes) -> None:
        with self._lock:
            self._channels.pop(channel, None)

    def _link(self, cluster: str) -> tuple[Link, Entrance | None]:
        """Under the lock."""
        if cluster not in self._links:
            line = self._context.line_to(cluster)
            self._links[cluster] = Link(cluster, self._context.link_to(cluster), line, self._config)
            if line is not None:
                self._entrances[cluster] = Entrance(self._links[cluster], line, f"pdd-tcp-line-{cluster}")
        return self._links[cluster], self._entrances.get(cluster)
