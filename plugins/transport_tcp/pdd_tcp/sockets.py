"""Sockets that never block, and the few operations that both sides need."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import ssl
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pdd_runtime.clock import now
from pdd_runtime.errors import RpcError, TransferError
from pdd_runtime.plugins.transport import LinkFacts
from pdd_runtime.rpc import said
from pdd_tcp import wire
from pdd_tcp.secure import SecureSocket

log = logging.getLogger(__name__)
Gate = Callable[[int], contextlib.AbstractContextManager[object]]
SMALLEST_BUFFER, LARGEST_BUFFER = 512 << 10, 64 << 20
MOST_AT_ONCE = 1 << 20
"""Bytes until which a thread that receives is left asleep; the kernel wakes it before where it cannot hold as many."""
WHILE = 0.1
"""Seconds after which it is woken for fewer."""
UNSENT_SECONDS = 0.01
SMALLEST_UNSENT, LARGEST_UNSENT = 16 << 10, 512 << 10
UNSENT_INSIDE = 64 << 10
"""Inside one host a copy is the whole way, and dear where the kernel's pages for it do not stay in a cache."""
_INFO = struct.Struct("8B24I")
_RTT, _RETRANSMITS = 8 + 15, 8 + 23


def _open_gate(length: int) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext()


class Cut(Exception):
    """The connection is of no use any more; what is missing may be asked for on another."""


class Left(Cut):
    """The peer closed it."""


class Damaged(Cut):
    """A frame was not what its checksum says."""


class Waiter:
    """Waits for one socket, in one thread."""

    def __init__(self, sock: socket.socket, event: int) -> None:
        self._poll = select.poll()
        self._poll.register(sock, event)
        self._secure = sock if isinstance(sock, SecureSocket) and event == select.POLLIN else None

    def wait(self, seconds: float | None) -> bool:
        """Whether there is something to do for the socket, waiting up to `seconds` for it; None: for ever."""
        if self._secure is not None and self._secure.holds:
            return True
        return bool(self._poll.poll(None if seconds is None else max(0.0, seconds) * 1000))


class Intake:
    """What comes on a socket, for one thread, which is woken for many bytes rather than for every few: that costs more
    than to copy them."""

    def __init__(self, sock: socket.socket, patience: float) -> None:
        """`patience`: seconds in which something has to come."""
        self._sock, self._patience, self._waiter = sock, patience, Waiter(sock, select.POLLIN)
        self._least = 1
        self._slack = sock.slack if isinstance(sock, SecureSocket) else 0
        self._empty = False
        """The kernel had less than was asked for."""

    def take(self, *memory: memoryview | bytearray) -> int:
        """How many bytes were there, into one `memory` after the other; 0: none yet. Raises `Cut`."""
        if self._empty:
            return 0
        try:
            received = self._sock.recvmsg_into(memory)[0]
        except BlockingIOError:
            self._empty = True
            return 0
        except OSError as error:
            raise broken(error) from error
        if not received:
            raise Left("the peer closed the connection")
        self._empty = received < sum(map(len, memory))
        return received

    def wait(self, nbytes: int) -> None:
        """Until there is more: of `nbytes` that are sure to come all, or many, or what comes in a while. Raises `Cut`
        where nothing does."""
        self._expect(max(1, min(nbytes, MOST_AT_ONCE) - self._slack))
        first = min(self._patience, WHILE)
        if not self._waiter.wait(first):
            self._expect(1)
            if not self._waiter.wait(self._patience - first):
                raise Cut("nothing came from the peer for too long")
        self._empty = False

    def fill(self, memory: memoryview) -> None:
        """All of it. What is behind it is waited for before it is taken, where this had to be. Raises `Cut`."""
        waited = False
        while memory:
            received = self.take(memory)
            if not received:
                self.wait(len(memory))
                waited = True
            memory = memory[received:]
        self._empty = self._empty or waited

    def _expect(self, nbytes: int) -> None:
        if nbytes != self._least:
            with contextlib.suppress(OSError):  # A kernel that cannot wakes us for less.
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            self._least = nbytes


def set_up(sock: socket.socket, io_timeout: float) -> None:
    """Make it a socket that does not block, sends at once, and breaks where the peer acknowledges nothing for
    `io_timeout` seconds."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(io_timeout * 1000)))


def tune_sender(sock: socket.socket, link: LinkFacts | None, streams: int, congestion: str) -> None:
    """What of a link's way is this connection's, one of `streams`. What is not sent yet stays with us rather than with
    the kernel, beyond what the link takes in 10 ms: so what is sent next is decided late."""
    unsent = UNSENT_INSIDE if _inside(sock) else LARGEST_UNSENT
    if link is not None:
        share = link.bandwidth / 8 / streams
        unsent = int(min(LARGEST_UNSENT, max(SMALLEST_UNSENT, share * UNSENT_SECONDS)))
        _set_buffer(sock, socket.SO_SNDBUF, "w", 2 * share * link.rtt)
        _set_congestion(sock, ("bbr", "cubic") if congestion == "auto" else (congestion,))
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)


def tune_receiver(sock: socket.socket, link: LinkFacts | None, streams: int) -> None:
    """Room for twice what is under way on this connection, one of `streams`."""
    if link is not None:
        _set_buffer(sock, socket.SO_RCVBUF, "r", 2 * link.bandwidth / 8 * link.rtt / streams)


def _inside(sock: socket.socket) -> bool:
    """Whether both ends are in one host, by its address."""
    with contextlib.suppress(OSError):  # A peer that is gone.
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    return False


def _set_buffer(sock: socket.socket, option: int, kind: str, nbytes: float) -> None:
    """Unless the kernel's own tuning may go further than it lets us go."""
    wanted = int(min(LARGEST_BUFFER, max(SMALLEST_BUFFER, nbytes)))
    try:
        limit = int(Path(f"/proc/sys/net/core/{kind}mem_max").read_text())
        tuned = int(Path(f"/proc/sys/net/ipv4/tcp_{kind}mem").read_text().split()[2])
    except (OSError, ValueError, IndexError):
        limit = tuned = wanted
    if wanted <= limit or limit >= tuned:
        sock.setsockopt(socket.SOL_SOCKET, option, wanted)


def _set_congestion(sock: socket.socket, names: tuple[str, ...]) -> None:
    for name in names:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            return
        except (OSError, AttributeError):
            continue
    log.warning("pdd-tcp: this host has no congestion control %s; it uses its default", " or ".join(names))


class Way(NamedTuple):
    """What the kernel knows of a connection's way."""

    rtt: float
    """Seconds, smoothed."""
    retransmits: int
    """Segments since the start."""


def way_of(sock: socket.socket) -> Way | None:
    """None where the kernel does not say."""
    try:
        values = _INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))
    except (OSError, AttributeError, struct.error):
        return None
    return Way(values[_RTT] / 1e6, values[_RETRANSMITS])


def send_all(sock: socket.socket, data: bytes, seconds: float) -> None:
    """Every byte. Raises `Cut`, also where the peer takes nothing for `seconds`."""
    left, waiter = memoryview(data), Waiter(sock, select.POLLOUT)
    while left:
        try:
            left = left[sock.send(left) :]
        except BlockingIOError:
            if not waiter.wait(seconds):
                raise Cut("the peer took nothing for too long") from None
        except OSError as error:
            raise broken(error) from error


def receive_message(sock: socket.socket, limit: int, until: float, gate: Gate = _open_gate) -> bytearray:
    """One message behind its prefix, whole by `until` (`clock.now`); `gate(length)` is held while the rest comes.

    Memory grows with what has really come, never with what a prefix promises. Raises `Cut`, and `TransferError`
    for a peer of another protocol, or a message past `limit` bytes.
    """
    length, checksum = wire.unpack_prefix(bytes(_receive_by(sock, wire.PREFIX.size, until)), limit)
    with gate(length):
        body = _receive_by(sock, length, until)
    if wire.checksum_of(body) != checksum:
        raise Damaged("a message is not what its checksum says")
    return body


def _receive_by(sock: socket.socket, length: int, until: float) -> bytearray:
    data, waiter = bytearray(), Waiter(sock, select.POLLIN)
    while len(data) < length:
        try:
            piece = sock.recv(min(length - len(data), 1 << 18))
        except BlockingIOError:
            if not waiter.wait(until - now()):
                raise Cut("a message was not whole in time") from None
            continue
        except OSError as error:
            raise broken(error) from error
        if not piece:
            raise Left("the peer closed the connection")
        data += piece
    return data


def shake_hands(sock: SecureSocket, seconds: float) -> None:
    """Let each side see the other's certificate. Raises `TransferError` for a peer that is not to be talked to, `Cut`
    for one that leaves, or has not done its part in so many `seconds`."""
    until, waiter = now() + seconds, Waiter(sock, select.POLLIN)
    try:
        while not sock.shake():
            if not waiter.wait(until - now()):
                raise Cut(f"no TLS handshake in {seconds:g} s")
            with contextlib.suppress(BlockingIOError):
                if not sock.take():
                    raise Cut("the peer left in the TLS handshake")
    except RpcError as error:
        raise TransferError(error.what, where=error.where, why=error.why, fix=error.fix) from error
    except OSError as error:
        raise broken(error) from error


def broken(error: OSError) -> Cut:
    if isinstance(error, ssl.SSLError):
        return Cut(f"the connection broke: {said(error)}")
    return Cut(f"the connection broke: {error.strerror or error}")


def shut(sock: socket.socket) -> None:
    """End the connection both ways at once: whatever thread waits on it wakes."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def take_leave(sock: socket.socket, seconds: float) -> None:
    """Let the peer read the last words: a socket closed over unread bytes would reset the connection instead."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        until, waiter = now() + seconds, Waiter(sock, select.POLLIN)
        while waiter.wait(until - now()):
            if not sock.recv(1 << 16):
                return
