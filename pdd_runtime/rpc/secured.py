"""TLS between a socket and a channel, on the event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from pdd_runtime.errors import ConnectionLost, PddError, RpcError
from pdd_runtime.rpc.frames import Bye, encode
from pdd_runtime.rpc.sealing import Sealing
from pdd_runtime.rpc.tls import Tls, said

LINGER = 1.0
"""Seconds for the peer to read why it is refused, before the connection is reset."""
PIECE = 256 << 10


class Secured(asyncio.Protocol, asyncio.Transport):
    """The socket's protocol, and the transport of the protocol inside, which is made when the handshake is done."""

    def __init__(
        self,
        tls: Tls,
        make: Callable[[Secured], asyncio.Protocol],
        *,
        server: bool,
        timeout: float,
        refused: Callable[[Secured, PddError], None],
    ) -> None:
        """`refused` is called once where there is no handshake in `timeout` seconds, or one that fails."""
        super().__init__()
        self.trouble: PddError | None = None
        """Why the connection is of no use, where TLS says so."""
        self.where = ""
        self._sealing, self._server = Sealing(tls, server=server), server
        self._make, self._timeout, self._refused = make, timeout, refused
        self._inside: asyncio.Protocol | None = None
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def cluster(self) -> str:
        """Of the peer, by its certificate."""
        return self._sealing.cluster

    # The socket's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = cast(asyncio.Transport, transport)
        host, port = (transport.get_extra_info("peername") or ("?", 0))[:2]
        self.where = f"{host}:{port}"
        self._timer = asyncio.get_running_loop().call_later(self._timeout, self._late)
        self._shake()

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self._sealing.came(data)
        if self._inside is None:
            self._shake()
        if self._inside is not None:
            self._read(self._inside)

    def eof_received(self) -> None:
        """The transport closes; `connection_lost` says the rest."""

    def pause_writing(self) -> None:
        if self._inside is not None:
            self._inside.pause_writing()

    def resume_writing(self) -> None:
        if self._inside is not None:
            self._inside.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._inside is not None:
            self._inside.connection_lost(self.trouble or exc)
        elif self.trouble is None:
            why = str(exc) if exc else ""
            self._tell(ConnectionLost("the peer left in the TLS handshake", where=self.where, why=why))

    # The transport of the protocol inside

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._ended or self._raw.is_closing():
            return
        try:
            self._sealing.seal(memoryview(data))
        except ssl.SSLError as error:
            self._broken(error)
            return
        self._raw.write(self._sealing.leaving())

    def write_eof(self) -> None:
        self._ended = True
        self._sealing.end()
        self._raw.write(self._sealing.leaving())
        self._raw.write_eof()

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()

    def can_write_eof(self) -> bool:
        return True

    def abort(self) -> None:
        if self.where:
            self._raw.abort()

    def close(self) -> None:
        self._raw.close()

    def is_closing(self) -> bool:
        return self._raw.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._raw.get_extra_info(name, default)

    def _shake(self) -> None:
        try:
            done = self._sealing.shake()
        except RpcError as error:
            self._refuse(error)
            return
        self._raw.write(self._sealing.leaving())
        if done:
            assert self._timer is not None
            self._timer.cancel()
            self._inside = self._make(self)
            self._inside.connection_made(self)

    def _read(self, inside: asyncio.Protocol) -> None:
        pieces = []
        try:
            while piece := self._sealing.read(PIECE):
                pieces.append(piece)
        except ssl.SSLError as error:
            self._broken(error)
            return
        if answer := self._sealing.leaving():
            self._raw.write(answer)
        if pieces:
            inside.data_received(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if piece == b"":
            self._raw.close()

    def _broken(self, error: ssl.SSLError) -> None:
        self.trouble = RpcError("the TLS connection broke", where=self.where, why=said(error))
        self._raw.abort()

    def _late(self) -> None:
        self._tell(RpcError(f"no TLS handshake in {self._timeout:g} s", where=self.where))
        self._raw.abort()

    def _refuse(self, error: RpcError) -> None:
        """The peer is told by TLS where that can, and gets a moment to read it."""
        self._tell(RpcError(error.what, where=self.where, why=error.why, fix=error.fix))
        self._ended = True
        bye = encode(Bye(error.to_wire()))
        if self._sealing.done:
            self._sealing.seal(bye)
        # TLS has no word for who does not speak it: such a one can read this.
        self._raw.write(self._sealing.leaving() or (bye if self._server else b""))
        with suppress(OSError):  # It has left in this very moment.
            self._raw.write_eof()
        assert self._timer is not None
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(LINGER, self._raw.abort)

    def _tell(self, error: PddError) -> None:
        self.trouble = error
        self._refused(self, error)
