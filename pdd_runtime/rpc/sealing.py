"""TLS of one connection, without its socket: whoever has the socket says what came and sends what goes."""

from __future__ import annotations

import ssl
from typing import cast

from pdd_runtime.errors import RpcError
from pdd_runtime.rpc.tls import Tls, said

RECORD = 16 << 10
"""Bytes of plain text in one record at most."""
RECORD_BYTES = RECORD + 512
"""And of the record itself."""


class Sealing:
    """Not thread-safe. What is to be sent, `leaving` gives: also behind an error, so that the peer learns why."""

    def __init__(self, tls: Tls, *, server: bool) -> None:
        self._tls, self._in, self._out = tls, ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = tls.session(server=server, bios=(self._in, self._out))
        self.cluster = ""
        """Of the peer, by its certificate; known when the handshake is done."""
        self.done = False
        """The handshake is: what is sealed can be read by the peer, whether it is let in or not."""

    @property
    def holds(self) -> bool:
        """There may be something to read that the socket does not show any more."""
        return bool(self._in.pending or self._session.pending())

    def came(self, data: bytes | memoryview) -> None:
        self._in.write(data)

    def leaving(self) -> bytes:
        return self._out.read()

    def shake(self) -> bool:
        """Go on with the handshake; True when it is done. Raises `RpcError` for a peer that is not to be talked to."""
        try:
            self._session.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise refused(error) from error
        self.done = True
        self.cluster = self._tls.cluster_of(self._session.getpeercert() or {})
        return True

    def read(self, most: int) -> bytes | None:
        """Plain text; empty at the end, None where more must come first. Raises `ssl.SSLError`."""
        try:
            return self._session.read(most)
        except ssl.SSLWantReadError:
            return None

    def read_into(self, memory: memoryview | bytearray) -> int | None:
        """The same, with how many bytes."""
        try:
            return cast(int, self._session.read(len(memory), memory))
        except ssl.SSLWantReadError:
            return None

    def seal(self, data: bytes | memoryview) -> None:
        """All of it. Raises `ssl.SSLError`."""
        view = memoryview(data)
        while view:
            view = view[self._session.write(view) :]

    def end(self) -> None:
        """Nothing more is sent."""
        try:
            self._session.unwrap()
        except ssl.SSLError:
            # It waits for the peer's own end, which is not waited for here.
            return


def refused(error: ssl.SSLError) -> RpcError:
    """Of a handshake that failed, on either side."""
    return RpcError(
        "no TLS connection with the peer",
        why=said(error),
        fix="both sides need spec.security.tls, with certificates of this graph by one CA",
    )
