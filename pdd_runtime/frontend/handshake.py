"""A client of HTTPS, until it is known to be one: whoever does not end the handshake in time holds no place."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

from pdd_runtime.frontend.protocol import Connections, Protocol
from pdd_runtime.rpc import Strangers

HANDSHAKE_TIME = 5.0
"""Seconds."""


class Handshake(asyncio.Protocol):
    """Hands the connection to the protocol that `make` makes, with all that has come meanwhile."""

    def __init__(
        self,
        make: Callable[[], Protocol],
        tls: ssl.SSLContext,
        connections: Connections,
        strangers: Strangers[Handshake],
    ) -> None:
        self._make, self._tls, self._of, self._strangers = make, tls, connections, strangers
        self._came = bytearray()
        self._lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._plain = cast(asyncio.Transport, transport)
        self._plain.pause_reading()
        oldest = self._strangers.come(self)
        if oldest is not None:
            oldest._plain.abort()
            oldest._refused("it waited the longest, and the place was needed")
        self._task = asyncio.get_running_loop().create_task(self._shake(), name="TLS handshake")

    def data_received(self, data: bytes) -> None:
        self._came += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True

    async def _shake(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            secure = await loop.start_tls(
                self._plain, self, self._tls, server_side=True, ssl_handshake_timeout=HANDSHAKE_TIME
            )
        except OSError as error:  # ssl.SSLError and all ends of connections are such
            self._plain.abort()
            if self._strangers.know(self):
                self._refused(f"no TLS handshake in {HANDSHAKE_TIME:g} s: {error}".rstrip(": "))
            return
        if not self._strangers.know(self) or secure is None or self._lost:
            return
        protocol = self._make()
        secure.set_protocol(protocol)
        protocol.connection_made(secure)
        if self._came:
            protocol.data_received(bytes(self._came))

    def _refused(self, why: str) -> None:
        client = self._plain.get_extra_info("peername") or ("somebody",)
        self._of.refusals.warning("connection of %s closed: %s", client[0], why)
