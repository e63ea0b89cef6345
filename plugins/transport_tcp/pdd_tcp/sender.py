"""The serving side: a listener, a thread per connection, and the sessions they belong to."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading

from pdd_runtime.clock import now
from pdd_runtime.errors import Cancelled, PddError, RemoteError, TransferError
from pdd_runtime.plugins.transport import BlockSource, TransportContext
from pdd_runtime.rpc import Line
from pdd_tcp import wire
from pdd_tcp.config import TcpConfig
from pdd_tcp.pacing import DirectOutlet, Entrance, LineOutlet, Outlet
from pdd_tcp.session import Session
from pdd_tcp.sockets import Cut, receive_message, set_up, shut, spoken, take_leave

log = logging.getLogger(__name__)
CONNECTIONS = 512
"""At once; more wait in the kernel's queue."""
LONG_HELLOS = 2
"""At once. Hellos are read before anything is known of the peer, and memory for them is bounded: 64 MiB twice,
1 MiB for every other connection."""
LONG_HELLO_BYTES = 1 << 20
LAST_WORDS_SECONDS = 1.0
MOST_STREAMS = 64


class Sender:
    """Feeds every receiver that subscribes, from one `BlockSource`."""

    def __init__(self, config: TcpConfig, context: TransportContext) -> None:
        self._config, self._context = config, context
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._slots = threading.BoundedSemaphore(CONNECTIONS)
        self._long_hellos = threading.BoundedSemaphore(LONG_HELLOS)
        self._sessions: dict[bytes, Session] = {}
        self._entrances: dict[str, Entrance] = {}
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

    def close(self) -> None:
        """Tell every receiver, end every connection, and return when all threads have ended. Blocks; idempotent."""
        self._closing.set()
        if self._accepting is None or self._wake is None:
            return
        self._wake.close()
        self._accepting.join()
        with self._lock:
            threads = list(self._connections.values())
        until = now() + LAST_WORDS_SECONDS
        for thread in threads:
            thread.join(max(0.0, until - now()))
        with self._lock:
            for sock in self._connections:
                shut(sock)
        for thread in threads:
            thread.join()
        for entrance in self._entrances.values():
            entrance.close()

    def _accept(self, listener: socket.socket, woken: socket.socket, source: BlockSource) -> None:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(woken, select.POLLIN)
        accepted = 0
        with listener, woken:
            while not self._closing.is_set():
                if not self._slots.acquire(timeout=0.2):
                    continue
                poll.poll()
                if self._closing.is_set():
                    return
                accepted += 1
                try:
                    sock, _ = listener.accept()
                    self._begin(sock, source, f"pdd-tcp-send-{accepted}")
                except (OSError, RuntimeError) as error:
                    # A peer that left at once, or no file or thread to be had: later ones are to be served.
                    log.warning("pdd-tcp: cannot accept: %s", error)
                    self._slots.release()
                    self._closing.wait(0.05)

    def _begin(self, sock: socket.socket, source: BlockSource, name: str) -> None:
        thread = threading.Thread(target=self._connection, args=(sock, source), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            sock.close()
            raise
        with self._lock:
            # Ended threads are forgotten here rather than by themselves: `close` misses none that way.
            self._connections = {s: t for s, t in self._connections.items() if t.is_alive()}
            self._connections[sock] = thread

    def _connection(self, sock: socket.socket, source: BlockSource) -> None:
        try:
            self._serve(sock, source)
        except Cut as cut:
            log.debug("pdd-tcp: %s", cut)
        except PddError as error:
            log.info("pdd-tcp: %s", error)
        except Exception:
            log.exception("pdd-tcp: a stream failed")
        finally:
            with self._lock:
                sock.close()
            self._slots.release()

    def _serve(self, sock: socket.socket, source: BlockSource) -> None:
        try:
            hello = self._hello(sock)
            session = self._session(hello, source)
        except PddError as error:
            with contextlib.suppress(OSError):
                sock.settimeout(LAST_WORDS_SECONDS)
                sock.sendall(wire.pack(wire.Refuse(wire.short(error))))
            take_leave(sock, LAST_WORDS_SECONDS)
            raise
        try:
            set_up(sock, self._config.io_timeout)
            self._stream(sock, session)
        finally:
            if session.leave():
                with self._lock:
                    del self._sessions[hello.fetch]
                session.close()

    def _hello(self, sock: socket.socket) -> wire.Hello:
        until = now() + self._config.io_timeout
        return wire.unpack_hello(receive_message(sock, wire.HELLO_LIMIT, until, self._gate))

    def _gate(self, length: int) -> contextlib.AbstractContextManager[object]:
        return self._long_hellos if length > LONG_HELLO_BYTES else contextlib.nullcontext()

    def _session(self, hello: wire.Hello, source: BlockSource) -> Session:
        """The session of a hello, joined. Raises `PddError`: the receiver is refused."""
        if isinstance(hello, wire.Attach):
            with self._lock:
                session = self._sessions.get(hello.fetch)
            if session is None or not session.join():
                raise TransferError("no such fetch is served here")
            return session
        subscription = hello.subscription()
        line = self._context.line_to(subscription.cluster)
        if line is not None:
            # The hello crossed the link as well. Its own side cannot know how long: it is not told where this one is.
            self._closing.wait(line.delay)
        try:
            feed = source.open(subscription)
        except PddError:
            raise
        except Exception as error:
            log.exception("pdd-tcp: the block source failed")
            raise RemoteError(f"{type(error).__name__}: {error}") from error
        session = Session(feed, subscription, hello.fetch, hello.beat)
        session.join()
        with self._lock:
            known = self._sessions.setdefault(hello.fetch, session)
        if known is not session:
            feed.close()
            raise TransferError("the fetch is served already")
        return session

    def _stream(self, sock: socket.socket, session: Session) -> None:
        def left(seconds: float) -> bool:
            if self._closing.is_set():
                raise Cancelled("the sender of KV shuts down")
            return spoken(sock, seconds)

        line = self._context.line_to(session.cluster)
        outlet: Outlet = DirectOutlet(sock)
        if line is not None:
            outlet = LineOutlet(sock, self._entrance(session.cluster, line), f"{threading.current_thread().name}-line")
        try:
            # One stream fills an emulated line, and keeps at most one chunk of this fetch in its entrance.
            outlet.send([wire.pack(wire.Accept(streams=MOST_STREAMS if line is None else 1))])
            session.serve(outlet, left)
        finally:
            # Before the session drops its pins: nothing may read a block's memory after that.
            outlet.close(flush=False)

    def _entrance(self, cluster: str, line: Line) -> Entrance:
        with self._lock:
            if cluster not in self._entrances:
                self._entrances[cluster] = Entrance(line, f"pdd-tcp-line-{cluster}")
            return self._entrances[cluster]
