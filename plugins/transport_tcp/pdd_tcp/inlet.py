"""One connection on which blocks arrive."""

from __future__ import annotations

import logging
import os
import select
import socket
import ssl
import threading
from typing import Any, Protocol

from pdd_runtime.clock import now
from pdd_runtime.errors import PddError, TransferError
from pdd_runtime.plugins.transport import LinkFacts
from pdd_runtime.rpc import Tls, said
from pdd_tcp import wire
from pdd_tcp.incoming import Incoming
from pdd_tcp.secure import SecureSocket
from pdd_tcp.sockets import (
    Cut,
    Damaged,
    Intake,
    Waiter,
    receive_message,
    send_all,
    set_up,
    shake_hands,
    shut,
    tune_receiver,
)

log = logging.getLogger(__name__)
CONNECT_SECONDS = 5.0


class Owner(Protocol):
    """Whose connection it is. Called in the connection's thread."""

    def joined(self, inlet: Inlet, welcome: wire.Welcome) -> None:
        """The sender has taken it. Raises `Cut` where it is of no use any more."""
        ...

    def lost(self, inlet: Inlet, trouble: Cut | PddError) -> None:
        """It has ended; the last call. A `PddError` is what the sender has refused it with."""
        ...

    def fetch_of(self, number: int) -> Incoming | None:
        """Whose a frame is; None: of a fetch that has ended. Raises `Damaged` where there was none."""
        ...

    def ended(self, inlet: Inlet, number: int) -> None:
        """No frame of this fetch comes any more on this connection."""
        ...


class Inlet:
    """A thread that connects, and then reads frames into the memory of the fetches they belong to."""

    def __init__(
        self,
        address: tuple[str, int],
        hello: wire.Hello,
        io_timeout: float,
        owner: Owner,
        name: str,
        tls: Tls | None = None,
    ) -> None:
        self.hello = hello
        self.landed = False
        """Whether anything came."""
        self.greeted = False
        """Whether the sender may know of it."""
        self._address, self._io_timeout, self._owner = address, io_timeout, owner
        self._tls = tls
        self._beat = wire.Binding(hello.channel).session
        self._over = False
        self._lock = threading.Lock()
        """Guards the socket's life."""
        self._sock: socket.socket | None = None
        # Under this lock a sink's memory is written and read:
        self._landing = threading.Lock()
        self._fetch: Incoming | None = None
        self._target: memoryview | None = None
        self._drain = bytearray()
        self._header = bytearray(wire.FRAME_BYTES)
        self._ahead = 0
        """Bytes of the next frame's header that came with the last payload."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def started(self) -> bool:
        """It has a thread, which may have ended."""
        return self._thread.ident is not None

    def end(self) -> None:
        """Any thread: break it. Its own thread says when it is lost."""
        with self._lock:
            self._over = True
            if self._sock is not None:
                shut(self._sock)

    def tune(self, link: LinkFacts | None, streams: int) -> None:
        """By its own thread: it is one of so many over this link."""
        if self._sock is not None:
            tune_receiver(self._sock, link, streams)

    def join(self) -> None:
        self._thread.join()

    def send(self, message: wire.Subscribe | wire.Cancel) -> None:
        """One thread at a time. A failure is noticed by the reading thread."""
        with self._lock:
            sock = None if self._over else self._sock
        if sock is None:
            return
        try:
            send_all(sock, wire.pack(message), self._io_timeout)
        except (Cut, ValueError):  # `ValueError`: closed meanwhile.
            self.end()

    def release(self, fetch: Incoming) -> None:
        """Return when the memory of `fetch`, which is over, is not touched here any more: what still comes of it is
        thrown away."""
        with self._landing:
            if self._fetch is fetch:
                self._fetch = self._target = None

    def _run(self) -> None:
        trouble: Cut | PddError
        try:
            self._receive(self._open())
        except (Cut, PddError) as error:
            trouble = error
            if isinstance(error, Damaged):
                log.warning("pdd-tcp: what came from %s:%d is thrown away: %s", *self._address, error)
        except Exception as error:
            log.exception("pdd-tcp: a connection failed")
            trouble = Cut(f"{type(error).__name__}: {error}")
        with self._lock:
            self._over = True
            if self._sock is not None:
                self._sock.close()
        self._owner.lost(self, trouble)

    def _open(self) -> socket.socket:
        family, address = self._resolve()
        with self._lock:
            if self._over:
                raise Cut("the connection is closed")
            sock = self._sock = self._socket(family)
        set_up(sock, self._io_timeout)
        self._connect(sock, address)
        if isinstance(sock, SecureSocket):
            shake_hands(sock, self._io_timeout)
        self.greeted = True
        answer = self._greet(sock)
        if isinstance(answer, wire.Refuse):
            raise PddError.from_wire(answer.error)
        if isinstance(sock, SecureSocket) and answer.cluster != sock.sealing.cluster:
            raise TransferError(
                f"the sender is not where it says it is: in {answer.cluster!r}",
                why=f"its certificate is of cluster {sock.sealing.cluster!r}",
            )
        if answer.streams < 1 or not wire.SMALLEST_FRAME <= answer.frame <= wire.LARGEST_FRAME:
            raise wire.refused(f"{answer.streams} streams, frames of {answer.frame} bytes")
        self._frame = answer.frame
        self._owner.joined(self, answer)
        return sock

    def _socket(self, family: socket.AddressFamily) -> socket.socket:
        sock = socket.socket(family, socket.SOCK_STREAM)
        return sock if self._tls is None else SecureSocket(sock, self._tls, server=False)

    def _greet(self, sock: socket.socket) -> wire.Answer:
        try:
            send_all(sock, wire.pack(self.hello), self._io_timeout)
            return wire.unpack_answer(receive_message(sock, wire.ANSWER_LIMIT, now() + self._io_timeout))
        except Cut as cut:
            # Of TLS 1.3's two sides this one is done first: that it is refused comes where an answer should.
            if isinstance(cut.__cause__, ssl.SSLError):
                raise TransferError(
                    "the sender refuses the TLS connection",
                    why=said(cut.__cause__),
                    fix="both sides need spec.security.tls, with certificates of this graph by one CA",
                ) from cut
            raise

    def _resolve(self) -> tuple[socket.AddressFamily, Any]:
        try:
            family, _, _, _, address = socket.getaddrinfo(*self._address, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise Cut(f"cannot resolve {self._address[0]}: {error.strerror}") from error
        return family, address

    def _connect(self, sock: socket.socket, address: Any) -> None:
        try:
            sock.connect(address)
        except BlockingIOError:
            if not Waiter(sock, select.POLLOUT).wait(min(CONNECT_SECONDS, self._io_timeout)):
                raise Cut("cannot connect: nobody answers") from None
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise Cut(f"cannot connect: {os.strerror(error)}") from None
        except OSError as error:
            raise Cut(f"cannot connect: {error.strerror or error}") from error

    def _receive(self, sock: socket.socket) -> None:
        """Take frames until the connection ends, which it does by a `Cut`."""
        intake, header = Intake(sock, self._io_timeout), memoryview(self._header)
        while True:
            intake.fill(header[self._ahead :])
            self._ahead = 0
            frame = wire.unpack_frame(self._header)
            if frame is None:
                raise Damaged("a frame's header is not what its checksum says")
            if frame.kind == wire.DATA:
                self._data(intake, frame)
            elif frame.length > wire.ANSWER_LIMIT:
                raise Damaged(f"a frame of kind {frame.kind} with {frame.length} bytes")
            else:
                body = bytearray(frame.length)
                intake.fill(memoryview(body))
                if wire.checksum_of(body) != frame.body:
                    raise Damaged("a frame is not what its checksum says")
                self._notice(frame, bytes(body))

    def _data(self, intake: Intake, frame: wire.Frame) -> None:
        if frame.length > self._frame:
            raise Damaged(f"a frame of {frame.length} bytes, where they have {self._frame}")
        fetch = self._owner.fetch_of(frame.fetch)
        target = fetch.claim(frame) if fetch is not None else None
        with self._landing:
            if fetch is not None and not fetch.over:
                self._fetch, self._target = fetch, target
        done = 0
        while done < frame.length:
            with self._landing:
                view = self._nowhere(frame.length) if self._target is None else self._target
                received = intake.take(view[done:] if done else view, self._header)
            if not received:
                intake.wait(frame.length - done)
            done += received
        self._ahead = done - frame.length
        with self._landing:
            target, self._target, self._fetch = self._target, None, None
            right = target is None or wire.checksum_of(target) == frame.body
        if not right:
            raise Damaged("the bytes of a block are not what their checksum says")
        if target is not None and fetch is not None:
            self.landed = True
            fetch.landed(frame)

    def _nowhere(self, nbytes: int) -> memoryview:
        """Where bytes go that nobody wants any more."""
        if not self._drain:
            self._drain = bytearray(self._frame)
        return memoryview(self._drain)[:nbytes]

    def _notice(self, frame: wire.Frame, body: bytes) -> None:
        if frame.kind == wire.BEAT:
            if frame.bind != self._beat:
                raise Damaged("a beat of another channel")
            return
        fetch = self._owner.fetch_of(frame.fetch)
        if frame.kind == wire.ENDED:
            self._owner.ended(self, frame.fetch)
        elif fetch is None:
            return
        elif frame.kind == wire.GONE and not body:
            self.landed = True
            fetch.gone(frame)
        elif frame.kind == wire.END and len(body) == wire.DIGEST_BYTES:
            fetch.end(frame, body)
        elif frame.kind == wire.ERROR:
            fetch.refuse(frame, wire.unpack_error(body))
        else:
            raise Damaged(f"a frame of kind {frame.kind} with {len(body)} bytes")
