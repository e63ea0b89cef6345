"""Clients of HTTPS, until they are known to be such: whoever does not end the handshake in time holds no place."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from pdd_runtime.frontend.protocol import Connections
from pdd_runtime.rpc import Strangers
from pdd_runtime.waiting import watched

HANDSHAKE_TIME = 5.0
"""Seconds."""
AGAIN = 0.1
"""Seconds until more connections are taken, where the process has no file left for one."""


class TlsListener:
    """Stands for an `asyncio.Server`, which bounds neither how long handshakes take nor how many there are."""

    def __init__(
        self,
        sock: socket.socket,
        backlog: int,
        tls: ssl.SSLContext,
        protocol: Callable[[], asyncio.BaseProtocol],
        connections: Connections,
        most: int,
    ) -> None:
        """Listens at once. `most`: clients at once that have not ended their handshake."""
        self._tls, self._protocol, self._of = tls, protocol, connections
        self._strangers: Strangers[asyncio.Task[None]] = Strangers(most)
        self._shaking: set[asyncio.Task[None]] = set()
        sock.setblocking(False)
        sock.listen(backlog)
        accepting = asyncio.create_task(self._accept(sock), name="HTTPS clients")
        self._accepting = watched(accepting, "no connections of HTTPS clients are taken any more")

    def close(self) -> None:
        """Take no more."""
        self._accepting.cancel()

    async def wait_closed(self) -> None:
        for task in self._shaking:
            task.cancel()
        await asyncio.wait([self._accepting, *self._shaking])

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, address = await loop.sock_accept(sock)
            except OSError as error:
                self._of.refusals.warning("no connection can be taken: %s", error)
                await asyncio.sleep(AGAIN)
                continue
            task = loop.create_task(self._shake(client, str(address[0])), name="TLS handshake")
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)
            oldest = self._strangers.come(task)
            if oldest is not None:
                oldest.cancel("it waited the longest, and the place was needed")

    async def _shake(self, client: socket.socket, address: str) -> None:
        why = ""
        try:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol, client, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_TIME
            )
        except OSError as error:  # ssl.SSLError and all ends of connections are such
            why = f"no TLS handshake in {HANDSHAKE_TIME:g} s: {error}".rstrip(": ")
        except asyncio.CancelledError as error:
            why = str(error)
            raise
        finally:
            task = asyncio.current_task()
            assert task is not None
            self._strangers.know(task)
            if why:
                client.close()
                self._of.refusals.warning("connection of %s closed: %s", address, why)
