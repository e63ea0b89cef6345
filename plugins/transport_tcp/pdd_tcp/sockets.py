"""Blocking sockets, with the few operations that both sides need."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Callable, Sequence

from pdd_runtime.clock import now
from pdd_tcp import wire

Gate = Callable[[int], contextlib.AbstractContextManager[object]]


def _open_gate(length: int) -> contextlib.AbstractContextManager[object]:
    return contextlib.nullcontext()


class Cut(Exception):
    """The connection is of no use any more; what is missing may be asked for on another."""


def set_up(sock: socket.socket, io_timeout: float) -> None:
    """Make it a blocking socket that gives up after `io_timeout` seconds without a byte in or out.

    The kernel's own timeouts, rather than `settimeout`, which would poll before each call, and would not let one
    `recv` wait for a whole block.
    """
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds = int(io_timeout)
    patience = struct.pack("ll", seconds, max(1, int((io_timeout - seconds) * 1e6)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Small frames to a host that is gone would otherwise fill the kernel's buffer for many minutes.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, int(io_timeout * 1000)))


def send_all(sock: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    """Every byte of `parts`, straight from where they lie. Raises `Cut`."""
    left = [memoryview(part) for part in parts]
    while left:
        try:
            sent = sock.sendmsg(left)
        except BlockingIOError:
            raise Cut("the peer took nothing for too long") from None
        except OSError as error:
            raise Cut(f"the connection broke: {error.strerror or error}") from error
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]


def receive_into(sock: socket.socket, memory: memoryview) -> None:
    """Fill `memory`. Raises `Cut`."""
    while memory:
        try:
            received = sock.recv_into(memory, 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise Cut("nothing came from the peer for too long") from None
        except OSError as error:
            raise Cut(f"the connection broke: {error.strerror or error}") from error
        if received == 0:
            raise Cut("the peer closed the connection")
        memory = memory[received:]


def receive_message(sock: socket.socket, limit: int, until: float, gate: Gate = _open_gate) -> bytearray:
    """One message behind its prefix, whole by `until` (`clock.now`); `gate(length)` is held while the rest comes.

    Memory grows with what has really come, never with what a prefix promises. Raises `Cut`, and `TransferError`
    for a peer of another protocol, or a message past `limit` bytes.
    """
    length, checksum = wire.unpack_prefix(bytes(_receive_by(sock, wire.PREFIX.size, until)), limit)
    with gate(length):
        body = _receive_by(sock, length, until)
    if wire.checksum_of(body) != checksum:
        raise Cut("a greeting came damaged")
    return body


def _receive_by(sock: socket.socket, length: int, until: float) -> bytearray:
    data = bytearray()
    while len(data) < length:
        try:
            sock.settimeout(max(0.001, until - now()))
            piece = sock.recv(min(length - len(data), 1 << 18))
        except TimeoutError:
            raise Cut("a greeting was not whole in time") from None
        except OSError as error:
            raise Cut(f"the connection broke: {error.strerror or error}") from error
        if not piece:
            raise Cut("the peer closed the connection")
        data += piece
    return data


def spoken(sock: socket.socket, timeout: float) -> bool:
    """Whether the peer has closed, or sent something, waiting up to `timeout` seconds for it."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def shut(sock: socket.socket) -> None:
    """End the connection both ways at once: whatever thread waits on it wakes."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def take_leave(sock: socket.socket, seconds: float) -> None:
    """Let the peer read the last words: a socket closed over unread bytes would reset the connection instead."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)
        until = now() + seconds
        while (left := until - now()) > 0.0:
            sock.settimeout(left)
            if not sock.recv(1 << 16):
                return
