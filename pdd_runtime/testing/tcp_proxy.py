"""A TCP proxy that misbehaves where it is told to."""

from __future__ import annotations

import asyncio
import contextlib
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
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.count = 0
        """Connections so far."""
        self.passed = 0
        """Bytes that have come from the server and gone on to the client."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0, limit=_CHUNK)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    @property
    def endpoint(self) -> str:
        """Where it listens, as host:port."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
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

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        fault = self._faults[self.count] if self.count < len(self._faults) else None
        self.count += 1
        host, _, port = self._target.rpartition(":")
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
            pass  # The end of the test, or a server that is away. The server's own callback takes no cancelled task.
        finally:
            with contextlib.suppress(asyncio.CancelledError):
                await _part(reader, writer)
            self._connections.discard(task)

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
