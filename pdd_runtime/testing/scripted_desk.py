"""Where the scripted engine keeps KV for readers, as an engine with native KV does."""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from pdd_runtime.errors import EngineError
from pdd_runtime.testing.toy_sequence import ToySequence

TICKET = 32
"""Bytes of a ticket."""
HEADER_LIMIT = 4096
ASKING_TIME = 5.0
"""Seconds for a reader to say what it wants, and at the end that it has it."""


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an offer of the scripted engine says."""

    host: str
    port: int
    ticket: str
    model: str
    """The fingerprint."""
    tokens: int


class Header(msgspec.Struct, frozen=True):
    """What a reader is told first."""

    error: str = ""
    blocks: int = 0
    """How many follow, from the one asked for on."""
    block_bytes: int = 0


class Kept:
    """The KV of one sequence, for one reader."""

    def __init__(self, sequence: ToySequence, ticket: Ticket) -> None:
        self.sequence, self.ticket = sequence, ticket
        self.reader: asyncio.Task[None] | None = None
        """Serves its reader, who has come."""
        self.read: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """The reader has all, or an `EngineError` why it has not."""

    @property
    def open(self) -> bool:
        return not self.read.done()

    def fail(self, what: str) -> None:
        if self.open:
            self.read.set_exception(EngineError(what))
            self.read.exception()  # Whoever has closed the offer does not ask for it.


class ScriptedDesk:
    """A socket on the loopback. A reader shows its ticket and the block that it wants first, is sent that one and those
    behind it, and says when it has them. A ticket is good once, and until its lease has run out."""

    def __init__(self, model: str, rate: float | None) -> None:
        """`rate`: bytes a second to each reader; None: at once."""
        self._model, self._rate = model, rate
        self._kept: dict[str, Kept] = {}
        self._server: asyncio.Server | None = None
        self._readers: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._on_reader, "127.0.0.1", 0)

    async def close(self) -> None:
        """Every reader loses its connection. Idempotent."""
        if self._server is not None:
            self._server.close()
        for reader in self._readers:
            reader.cancel()
        if self._readers:
            await asyncio.wait(self._readers)

    @contextmanager
    def keep(self, sequence: ToySequence, lease: float, timeout: float) -> Iterator[Kept]:
        """Inside, a reader can have it: it must come within `lease` seconds, and have it all within `timeout`."""
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        kept = Kept(sequence, Ticket(host, port, secrets.token_hex(TICKET // 2), self._model, len(sequence.tokens)))
        self._kept[kept.ticket.ticket] = kept
        loop = asyncio.get_running_loop()
        timers = (loop.call_later(lease, self._expire, kept, lease), loop.call_later(timeout, self._late, kept))
        try:
            yield kept
        finally:
            for timer in timers:
                timer.cancel()
            del self._kept[kept.ticket.ticket]
            kept.fail("the offer was closed")
            if kept.reader is not None:
                kept.reader.cancel()

    @staticmethod
    def _expire(kept: Kept, lease: float) -> None:
        if kept.reader is None:
            kept.fail(f"the offer expired: no reader came in {lease:g} s")

    @staticmethod
    def _late(kept: Kept) -> None:
        kept.fail("the offer expired: its reader did not have all in time")

    async def _on_reader(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._readers.add(task)
        try:
            await self._serve(task, reader, writer)
        except (OSError, EOFError, TimeoutError, asyncio.CancelledError):
            writer.transport.abort()  # What it was reading says itself what happened.
        finally:
            self._readers.discard(task)
            writer.close()

    async def _serve(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with asyncio.timeout(ASKING_TIME):
            asked = await reader.readexactly(TICKET + 4)
        kept = self._kept.get(asked[:TICKET].decode("ascii", "replace"))
        if kept is None or not kept.open or kept.reader is not None:
            await self._say(writer, Header(error="no such offer: it has expired, or was closed, or read before"))
            return
        kept.reader = task
        try:
            await self._send(kept, struct.unpack("<I", asked[TICKET:])[0], writer)
            async with asyncio.timeout(ASKING_TIME):
                await reader.readexactly(1)
        except (OSError, EOFError, TimeoutError) as error:
            kept.fail(f"the reader went away before it had all: {type(error).__name__}")
            raise
        if kept.open:
            kept.read.set_result(None)

    async def _send(self, kept: Kept, first: int, writer: asyncio.StreamWriter) -> None:
        store = kept.sequence.store
        blocks = kept.sequence.blocks[first:]
        size = store.layout.block_bytes
        await self._say(writer, Header(blocks=len(blocks), block_bytes=size))
        for number in blocks:
            writer.write(bytes(store.memory(number)))
            await writer.drain()
            if self._rate:
                await asyncio.sleep(size / self._rate)

    @staticmethod
    async def _say(writer: asyncio.StreamWriter, header: Header) -> None:
        packed = msgspec.msgpack.encode(header)
        writer.write(struct.pack("<I", len(packed)) + packed)
        with suppress(OSError):
            await writer.drain()


async def pull(ticket: Ticket, first: int, blocks: int, block_bytes: int) -> bytes:
    """The blocks from `first` on, of which there must be `blocks`. Raises `EngineError`."""
    where = f"{ticket.host}:{ticket.port}"
    try:
        reader, writer = await asyncio.open_connection(ticket.host, ticket.port)
        try:
            writer.write(ticket.ticket.encode() + struct.pack("<I", first))
            (length,) = struct.unpack("<I", await reader.readexactly(4))
            if length > HEADER_LIMIT:
                raise EngineError(f"the offer's keeper sent a header of {length} bytes", where=where)
            header = msgspec.msgpack.decode(await reader.readexactly(length), type=Header)
            if header.error:
                raise EngineError(f"what was offered cannot be read: {header.error}", where=where)
            if (header.blocks, header.block_bytes) != (blocks, block_bytes):
                raise EngineError(
                    f"{header.blocks} blocks of {header.block_bytes} bytes were offered",
                    where=where,
                    why=f"{blocks} of {block_bytes} are missing here",
                )
            read = await reader.readexactly(blocks * block_bytes)
            writer.write(b"\1")
            await writer.drain()
            return read
        finally:
            writer.close()
    except (OSError, EOFError, msgspec.MsgspecError) as error:
        raise EngineError(
            "what was offered could not be read", where=where, why=f"{type(error).__name__}: {error}"
        ) from error
