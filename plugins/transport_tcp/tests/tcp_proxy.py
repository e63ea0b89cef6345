"""A network that misbehaves where it is told to."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Literal, NamedTuple, Self


class Fault(NamedTuple):
    """What happens to one connection after so many bytes from the sender to the receiver."""

    kind: Literal["cut", "flip", "freeze"]
    after: int


class Proxy:
    """Forwards connections; the n-th has the n-th fault, and those behind the last fault have none."""

    def __init__(self, target: str, *faults: Fault | None) -> None:
        self._target, self._faults = target, list(faults)
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.count = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0, limit=1 << 14)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    @property
    def endpoint(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def restart(self, target: str) -> None:
        """The sender is gone, and another process answers in its place."""
        self._target = target
        for task in self._connections:
            task.cancel()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        fault = self._faults[self.count] if self.count < len(self._faults) else None
        self.count += 1
        host, _, port = self._target.rpartition(":")
        writers = [writer]
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port), limit=1 << 14)
            writers.append(far_writer)
            pumps = [
                asyncio.create_task(self._pump(reader, far_writer, None)),
                asyncio.create_task(self._pump(far_reader, writer, fault)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except asyncio.CancelledError:
            pass  # By `restart` or the end of the test; the server's own callback takes no cancelled task.
        finally:
            for each in writers:
                each.transport.abort() if fault and fault.kind == "cut" else each.close()
            self._writers += writers
            self._connections.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault | None) -> None:
        passed = 0
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 14):
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
