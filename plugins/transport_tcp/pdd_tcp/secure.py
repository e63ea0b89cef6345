"""A socket that carries TLS, for code that reads and writes a plain one."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable
from typing import Any

from pdd_runtime.errors import RpcError
from pdd_runtime.rpc import RECORD_BYTES, Sealing, Tls

AT_ONCE = 256 << 10
"""Bytes that are sealed, or taken from the kernel, before anything else is done."""


class SecureSocket(socket.socket):
    """It does not block. `send`, `sendmsg`, `recv` and `recvmsg_into` are what crosses it, from one thread that reads
    and one that writes; as with a plain socket they raise `BlockingIOError` and `OSError`.

    What `send` took has left. Where the kernel takes a part of it, the same bytes must be sent again: they are those
    of a sealed record.
    """

    def __init__(self, sock: socket.socket, tls: Tls, *, server: bool) -> None:
        """Takes the place of `sock`, which is of no use any more."""
        super().__init__(sock.family, sock.type, sock.proto, fileno=sock.detach())
        self.sealing = Sealing(tls, server=server)
        self._lock = threading.Lock()
        self._unsent = memoryview(b"")
        self._spoke = False
        self._owed = 0
        """Bytes of plain text that are sealed and have not all left."""
        self._came = memoryview(bytearray(AT_ONCE))

    @property
    def slack(self) -> int:
        """Bytes that may have come already of a record that is not whole."""
        return RECORD_BYTES

    @property
    def holds(self) -> bool:
        """There may be something to read that the kernel does not show any more."""
        with self._lock:
            return self.sealing.holds

    def shake(self) -> bool:
        """Go on with the handshake, after something came; True when it is done. Raises `RpcError`."""
        with self._lock:
            try:
                done = self.sealing.shake()
            except RpcError:
                with contextlib.suppress(OSError):  # A peer that has left needs no reason.
                    self._flush()
                raise
            self._flush()
            return done

    def answer_in_clear(self, data: bytes) -> None:
        """Where no record of TLS came and none has left: what came was plain text, and so is what it can read."""
        if not self.sealing.done and not self._spoke:
            with contextlib.suppress(OSError):
                super().send(data)

    def take(self) -> bool:
        """What the kernel has, for the handshake; False at the end. Raises `BlockingIOError` and `OSError`."""
        with self._lock:
            return self._take()

    def send(self, data: Any, flags: int = 0) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Iterable[Any], *_: Any) -> int:
        parts = [memoryview(part) for part in buffers]
        total, done = sum(map(len, parts)), 0
        with self._lock:
            while self._flush():
                done += self._owed
                self._owed = 0
                if done == total:
                    return done
                self._owed = self._seal(parts, done)
        if not done:
            raise BlockingIOError
        return done

    def recv(self, most: int, flags: int = 0) -> bytes:
        with self._lock:
            while (data := self.sealing.read(most)) is None:
                if not self._take():
                    return b""
            return data

    def recvmsg_into(self, buffers: Iterable[Any], *_: Any) -> Any:
        done = 0
        with self._lock:
            for buffer in buffers:
                left = memoryview(buffer)
                while left:
                    received = self.sealing.read_into(left)
                    if received:
                        left = left[received:]
                        done += received
                    elif received == 0 or not self._more(done):
                        return done, [], 0, None
        return done, [], 0, None

    def _more(self, done: int) -> bool:
        """Whether there was more in the kernel. Raises where there is nothing, and nothing is `done` yet."""
        try:
            return self._take()
        except OSError:
            if not done:
                raise
            return False

    def _take(self) -> bool:
        received = super().recv_into(self._came)
        self.sealing.came(self._came[:received])
        return received > 0

    def _seal(self, parts: list[memoryview], skip: int) -> int:
        """The next of `parts`, behind their first `skip` bytes; returns how many."""
        sealed = 0
        for part in parts:
            rest = part[skip : skip + AT_ONCE - sealed]
            skip = max(0, skip - len(part))
            self.sealing.seal(rest)
            sealed += len(rest)
        return sealed

    def _flush(self) -> bool:
        """Whether all that is sealed has left."""
        try:
            while self._unsent or (fresh := self.sealing.leaving()):
                self._spoke = True
                if not self._unsent:
                    self._unsent = memoryview(fresh)
                self._unsent = self._unsent[super().send(self._unsent) :]
        except BlockingIOError:
            return False
        return True
