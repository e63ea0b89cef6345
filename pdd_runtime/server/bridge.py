"""The worker's side of the socket that a server's connector dials: block memory, and what is said about it.

Messages are JSON objects behind their length (little-endian, 4 bytes); the memory's descriptor goes with the first
byte of the answer to a greeting. The connector's side is the package `pdd_connector`, which speaks the same `VERSION`.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from pdd_runtime.errors import EngineError
from pdd_runtime.kv import BlockStore
from pdd_runtime.server.connection import (
    Announced,
    Bare,
    Connection,
    Geometry,
    Hello,
    Line,
    Notice,
    count,
    read_message,
)
from pdd_runtime.waiting import to_its_end

log = logging.getLogger(__name__)

GREETING_TIME = 10.0
"""Seconds from a connection to its greeting."""
ACK_TIME = 30.0
"""Seconds in which every connection must have taken note of a transfer, or its end. Its reading thread shares an
interpreter with the engine, which may be busy."""


class Bridge:
    """Listens at `path` for the connectors of one engine. On the event loop alone."""

    def __init__(
        self, store: BlockStore, path: Path, *, expects: Geometry, ranks: int, scheduler: bool = False
    ) -> None:
        """`store` must be shared. `expects`: the geometry that a connector must have, but for its capacity, and a block
        size of 0 is any. `scheduler`: whether the engine's scheduler has a connection of its own."""
        self._store, self.path = store, path
        self._expects, self._ranks, self._scheduler = expects, ranks, scheduler
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[Connection] = set()
        self._lines: dict[str, Line] = {}
        self._change = asyncio.Event()
        self.broken: asyncio.Future[EngineError] = asyncio.get_running_loop().create_future()
        """Done where a connector does not let go of blocks: nothing here can be trusted any more."""
        self.refusal = ""
        """Why the last connector that was refused was refused."""

    @property
    def engine(self) -> str:
        """Name and version of what is connected; empty: nothing is."""
        return next((connection.hello.engine for connection in self._connections), "")

    @property
    def capacity(self) -> int:
        """Tokens in the engine's own cache; 0 where nothing is connected."""
        found = [c.hello.geometry.capacity for c in self._connections if c.hello.geometry is not None]
        return min(found, default=0)

    @property
    def connected(self) -> bool:
        """Every rank is here, and the scheduler where it has a connection of its own."""
        scheduler = any(c.hello.role == "scheduler" for c in self._connections)
        return {c.hello.rank for c in self._workers} == set(range(self._ranks)) and scheduler >= self._scheduler

    async def start(self) -> None:
        """Listen. Raises `EngineError` where that cannot be."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.setblocking(False)
        try:
            with suppress(FileNotFoundError):
                self.path.unlink()
            listener.bind(str(self.path))
            self.path.chmod(0o600)
            listener.listen(64)
        except OSError as error:
            listener.close()
            raise EngineError(
                "the worker cannot listen for its engine's connector",
                where=str(self.path),
                why=str(error),
                fix="give a path that this user may write, of at most 100 bytes",
            ) from error
        self._listener = listener
        self._spawn(self._accept(listener), "accepting connectors")

    async def ready(self) -> None:
        """Return when every rank is connected. Raises `EngineError` at the first that had to be refused."""
        while not self.connected:
            if self.refusal:
                raise EngineError("the engine's connector does not fit this worker", why=self.refusal)
            self._change.clear()
            await self._change.wait()

    @asynccontextmanager
    async def announce(self, announced: Announced, on_notice: Callable[[Notice], None]) -> AsyncGenerator[None, None]:
        """Inside, every connection knows of the transfer; behind it none touches its blocks any more. `on_notice` is
        called on the event loop. Raises `EngineError` where a connection does not answer."""
        line = Line(announced, on_notice)
        self._lines[announced.id] = line
        try:
            line.ask(self._tell(announced))
            await self._answered(line, "took no note of a request")
            yield
        finally:
            line.on_notice = _ignore
            for connection in self._connections:
                connection.send({"t": "forget", "id": announced.id})
            line.ask(iter(self._connections))
            try:
                # The caller gives the blocks to others next: that must wait, also where the caller is cancelled.
                await to_its_end(asyncio.create_task(self._parted(line), name=f"the end of {announced.id}"))
            finally:
                del self._lines[announced.id]

    def add(self, id: str, blocks: tuple[int, ...], ids: tuple[int, ...]) -> None:
        """More blocks, and more known tokens, of an announced transfer."""
        for connection in self._connections:
            message: dict[str, Any] = {"t": "more", "id": id, "blocks": blocks}
            if connection.hello.tokens:
                message["ids"] = ids
            connection.send(message)

    def tail(self, id: str, tokens: int) -> None:
        """An announced transfer ends with so many tokens, though its request may go on: what there is of their KV is
        wanted now, the last block in part."""
        for connection in self._connections:
            connection.send({"t": "tail", "id": id, "tokens": tokens})

    async def close(self) -> None:
        """Hang up. Idempotent."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            with suppress(FileNotFoundError):
                self.path.unlink()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @property
    def _workers(self) -> list[Connection]:
        return [connection for connection in self._connections if connection.hello.role == "worker"]

    def _tell(self, announced: Announced) -> Iterator[Connection]:
        message: dict[str, Any] = {
            "t": "transfer",
            "id": announced.id,
            "tokens": len(announced.ids),
            "offered": announced.offered,
            "first": announced.first,
            "blocks": announced.blocks,
        }
        for connection in self._connections:
            named = {"ids": announced.ids, "salt": announced.salt}
            connection.send(message | named if connection.hello.tokens else message)
            yield connection

    async def _answered(self, line: Line, what: str) -> None:
        try:
            async with asyncio.timeout(ACK_TIME):
                await line.answered.wait()
        except TimeoutError:
            for connection in tuple(line.waiting):
                log.error("a connector of %s %s for %g s", connection.hello.engine, what, ACK_TIME)
                connection.close()
            raise EngineError(
                f"the engine's connector {what}",
                where=f"request {line.announced.id}",
                why=f"it did not answer in {ACK_TIME:g} s",
                fix="see the engine's log",
            ) from None

    async def _parted(self, line: Line) -> None:
        try:
            await self._answered(line, "still uses the blocks of a request")
        except EngineError as error:
            if not self.broken.done():
                self.broken.set_result(error)

    def _spawn(self, work: Any, name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("a connector could not be accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            self._spawn(self._serve(sock), "a connector")

    async def _serve(self, sock: socket.socket) -> None:
        connection: Connection | None = None
        try:
            async with asyncio.timeout(GREETING_TIME):
                hello = msgspec.convert(await read_message(Bare(sock)), Hello)
                why = hello.misfit(self._expects, self._ranks)
                # An ordinary stream cannot carry the descriptor.
                socket.send_fds(sock, [b"\0"], [self._store.fd])
            reader, writer = await asyncio.open_unix_connection(sock=sock)
            connection = Connection(hello, writer)
            if why:
                log.error("a connector was refused: %s", why)
                self.refusal = why
                connection.send({"t": "refused", "why": why})
                return
            connection.send(self._welcome())
            self._join(connection)
            while True:
                self._take(connection, await read_message(reader))
        except (OSError, EOFError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
            if not isinstance(error, EOFError):
                log.warning("a connector's connection ended: %s", error)
        finally:
            if connection is None:
                sock.close()
            else:
                self._part(connection)
                connection.close()
            self._changed()

    def _welcome(self) -> dict[str, Any]:
        layout = self._store.layout
        return {
            "t": "welcome",
            "blocks": self._store.blocks,
            "block_bytes": layout.block_bytes,
            "block_size": layout.block_size,
        }

    def _join(self, connection: Connection) -> None:
        hello = connection.hello
        log.info("connected: %s, %s of rank %d", hello.engine, hello.role, hello.rank)
        self._connections.add(connection)
        self.refusal = ""
        self._changed()

    def _part(self, connection: Connection) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            log.warning("disconnected: %s of rank %d", connection.hello.role, connection.hello.rank)
        for line in self._lines.values():
            line.answer(connection)

    def _changed(self) -> None:
        self._change.set()

    def _take(self, connection: Connection, message: dict[str, Any]) -> None:
        line = self._lines.get(message.get("id", ""))
        if line is None:
            return  # it crossed our last word about it
        kind = message["t"]
        if kind in ("ack", "forgot"):
            line.answer(connection)
        elif kind == "planned":
            line.on_notice(Notice("planned", count(message, "offered"), count(message, "local")))
        elif kind in ("loaded", "written", "finished"):
            said = line.said.setdefault(kind, {})
            said[connection.hello.rank] = count(message, "tokens")
            if len(said) == self._ranks:
                line.on_notice(Notice(kind, min(said.values())))
        else:
            raise ValueError(f"a message of an unknown type: {kind}")


def _ignore(notice: Notice) -> None:
    """The transfer is over."""
