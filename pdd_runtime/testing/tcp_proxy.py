"""A TCP proxy that misbehaves where it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Literal, NamedTuple, Self

_CHUNK = 1 << 14


class Fault(NamedTuple):
    """What happens to one connection when so many bytes have come from the server: it is cut, a bit is flipped, or
    nothing comes any more."""

    kind: Literal["cut", "flip", "freeze"]
    after: int


class TcpProxy:
    """Forwards connections to `target` (host:port); the n-th has the n-th fault, those behind the last one none."""

    def __init__(self, target: str, *faults: Fault | None) -> None:
        self._target, self._faults = target, faults
        self._listener: socket.socket | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.count = 0
        """Connections so far."""
        self.passed = 0
        """Bytes that have come from the server and gone on to the client."""

    async def __aenter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._listener))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        self._listener.close()
        self.cut()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def endpoint(self) -> str:
        """Where it listens, as host:port."""
        assert self._listener is not None
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    def restart(self, target: str) -> None:
        """The server is gone, and another one answers in its place."""
        self.retarget(target)
        self.cut()

    def retarget(self, target: str) -> None:
        """Lead new connections there, and leave those alone that there are."""
        self._target = target

    def cut(self) -> None:
        """Break all connections that there are."""
        for task in self._connections:
            task.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        """An `asyncio.Server` that is closed while it accepts leaves that connection open, to nobody's knowledge."""
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(listener)
            task = asyncio.create_task(self._connect(near))
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)

    async def _connect(self, near: socket.socket) -> None:
        fault = self._faults[self.count] if self.count < len(self._faults) else None
        self.count += 1
        host, _, port = self._target.rpartition(":")
        reader, writer = await asyncio.open_connection(sock=near, limit=_CHUNK)
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port), limit=_CHUNK)
            pumps = [
                asyncio.create_task(self._pump(reader, far_writer, None)),
                asyncio.create_task(self._pump(far_reader, writer, fault, count=True)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                # Before anything is waited for: who ends the proxy may cancel that, too.
                far_writer.transport.abort()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (asyncio.CancelledError, OSError):
            pass  # The end of the test, or a server that is away.
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await _part(reader, writer)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault | None, *, count: bool = False
    ) -> None:
        passed = 0
        # All that is counted has left, also where the connection is cut thereafter.
        writer.transport.set_write_buffer_limits(0)
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(_CHUNK):
                strikes = fault is not None and passed <= fault.after < passed + len(data)
                if fault is not None and strikes:
                    at = fault.after - passed
                    data = data[:at] + (bytes([data[at] ^ 0x10]) + data[at + 1 :] if fault.kind == "flip" else b"")
                passed += len(data)
                writer.write(data)
                self.passed += len(data) * count
                await writer.drain()
                if fault is not None and strikes and fault.kind == "freeze":
                    await asyncio.Event().wait()
                if fault is not None and strikes and fault.kind == "cut":
                    return


async def _part(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End a connection so that all that was written arrives: closed over unread bytes, it would be reset instead."""
    try:
        with contextlib.suppress(OSError, TimeoutError):
            writer.write_eof()
            async with asyncio.timeout(1.0):
                while await reader.read(_CHUNK):
                    pass
    finally:
        writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
