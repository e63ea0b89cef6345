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

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        fault = self._faults[self.count] if self.count < len(self._faults) else None
        self.count += 1
        host, _, port = self._target.rpartition(":")
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port), limit=_CHUNK)
            writers.append(far_writer)
            pumps = [
                asyncio.create_task(_pump(reader, far_writer, None)),
                asyncio.create_task(_pump(far_reader, writer, fault)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (asyncio.CancelledError, OSError):
            pass  # The end of the test, or a server that is away. The server's own callback takes no cancelled task.
        finally:
            for each in writers:
                each.transport.abort() if fault and fault.kind == "cut" else each.close()
            for each in writers:
                with contextlib.suppress(OSError):
                    await each.wait_closed()
            self._connections.discard(task)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault | None) -> None:
    passed = 0
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(_CHUNK):
            if fault and passed <= fault.after < passed + len(data):
                at = fault.after - passed
                if fault.kind == "flip":
                    data = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
                else:
                    writer.write(data[:at])
                    await writer.drain()
                    if fault.kind == "freeze":
                        await asyncio.Event().wait()
                    return
            passed += len(data)
            writer.write(data)
            await writer.drain()
