"""Those who are not to be let in: what they do at a door of the message plane, and what is to be heard there."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import msgspec

from pdd_runtime.errors import PddError
from pdd_runtime.rpc import Greeting, RpcConnection, Sealing, Tls, connect
from pdd_runtime.rpc.frames import Bye, FrameDecoder, Hello, encode

PATIENCE = 30.0
"""Seconds in which every one of them is refused, on a busy machine as well."""
_LENGTH = 4


@dataclass(frozen=True)
class Door:
    """Where a process of the graph listens, and what would open it."""

    endpoint: str
    greeting: Greeting
    """Of one that is let in: with the graph's name and its secret."""
    tls: Tls | None = None
    """Its certificate, where the graph has TLS."""
    other: Tls | None = None
    """A certificate by a CA that the graph does not know."""

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.endpoint.rpartition(":")
        return host.strip("[]"), int(port)

    async def connect(self) -> RpcConnection:
        """As one that is let in. Raises what `rpc.connect` raises."""
        return await connect(self.endpoint, self.greeting, tls=self.tls, timeout=PATIENCE)


@dataclass(frozen=True)
class Stranger:
    """One who is refused."""

    name: str
    logs: str
    """A pattern of the line that the process writes about it."""
    come: Callable[[Door], Awaitable[str]]
    """Do it. Returns, once it is refused, what it was told; empty: it was only cut off. Raises `TimeoutError` where it
    is not refused."""
    needs_tls: bool = False

    def is_in(self, log: str) -> bool:
        """Whether the process has written its line."""
        return re.search(self.logs, log) is not None


class Line:
    """A connection as a stranger has it: bytes, sealed where the door wants TLS."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, tls: Tls | None) -> None:
        self._reader, self._writer = reader, writer
        self._sealing = None if tls is None else Sealing(tls, server=False)

    async def shake(self) -> None:
        while self._sealing is not None:
            done = self._sealing.shake()
            self._writer.write(self._sealing.leaving())
            if done:
                return
            self._sealing.came(await self._reader.read(1 << 16))

    async def say(self, data: bytes) -> None:
        """Raises `ConnectionError` where the door is closed."""
        if self._sealing is not None:
            self._sealing.seal(data)
            data = self._sealing.leaving()
        self._writer.write(data)
        await self._writer.drain()

    async def hear(self) -> bytes:
        """What comes next; empty: nothing more does."""
        while data := await self._reader.read(1 << 16):
            if self._sealing is None:
                return data
            self._sealing.came(data)
            if (plain := self._sealing.read(1 << 16)) is not None:
                return plain
        return b""

    async def told(self) -> str:
        """The reason of the goodbye; empty where the connection ends without one."""
        decoder = FrameDecoder(1 << 20)
        with suppress(ConnectionError, ssl.SSLError):
            while data := await self.hear():
                for frame in decoder.feed(data):
                    if isinstance(frame, Bye):
                        return str(PddError.from_wire(frame.error)) if frame.error else ""
        return ""


@asynccontextmanager
async def at(door: Door) -> AsyncIterator[Line]:
    """A line to the door, with a certificate where one is asked for. Nothing is said yet."""
    async with asyncio.timeout(PATIENCE):
        reader, writer = await asyncio.open_connection(*door.address)
        try:
            line = Line(reader, writer, door.tls)
            await line.shake()
            yield line
        finally:
            writer.close()


def framed(body: bytes, length: int | None = None) -> bytes:
    """A frame; with `length`, of one that lies about its own."""
    return (len(body) if length is None else length).to_bytes(_LENGTH, "big") + body


async def _says(door: Door, *frames: bytes) -> str:
    async with at(door) as line:
        with suppress(ConnectionError):
            for frame in frames:
                await line.say(frame)
        return await line.told()


async def _greets(door: Door, greeting: Greeting, tls: Tls | None) -> str:
    try:
        connection = await connect(door.endpoint, greeting, tls=tls, timeout=PATIENCE)
    except PddError as error:
        return str(error)
    await connection.close()
    raise TimeoutError(f"{greeting} was let in")


def _greeting(**changes: str) -> Callable[[Door], Awaitable[str]]:
    return lambda door: _greets(door, msgspec.structs.replace(door.greeting, name="stranger/0", **changes), door.tls)


async def _of_another_ca(door: Door) -> str:
    return await _greets(door, door.greeting, door.other)


async def _without_tls(door: Door) -> str:
    return await _greets(door, door.greeting, None)


async def _silent(door: Door) -> str:
    return await _says(door)


async def _slow(door: Door) -> str:
    """A greeting byte by byte, which would take half an hour."""
    async with at(door) as line:
        telling = asyncio.create_task(line.told())
        with suppress(ConnectionError):
            for byte in encode(Hello(door.greeting)):
                await line.say(bytes([byte]))
                if (await asyncio.wait({telling}, timeout=10.0))[0]:
                    break
        return await telling


def _behind_a_greeting(*frames: bytes) -> Callable[[Door], Awaitable[str]]:
    return lambda door: _says(door, encode(Hello(door.greeting)), *frames)


def _before_a_greeting(*frames: bytes) -> Callable[[Door], Awaitable[str]]:
    return lambda door: _says(door, *frames)


STRANGERS = (
    Stranger("a worker of another CA", r"refused: .*no TLS connection", _of_another_ca, needs_tls=True),
    Stranger("one without TLS", r"it does not speak TLS", _without_tls, needs_tls=True),
    Stranger("a worker of another graph", r"belong to different graphs: 'another'", _greeting(graph="another")),
    Stranger("a worker of an earlier run", r"do not share a secret", _greeting(secret="of-an-earlier-run")),
    Stranger("a name of a book's length", r"a name of 10000 characters", _greeting(cluster="x" * 10_000)),
    Stranger("a frame of 2 GB", r"announced a frame of 2147483648 bytes", _before_a_greeting(framed(b"", 2 << 30))),
    Stranger(
        "a frame of 2 GB behind a greeting",
        r"announced a frame of 2147483648 bytes",
        _behind_a_greeting(framed(b"\x93", 2 << 30)),
    ),
    Stranger("noise", r"announced a frame of|is no frame", _before_a_greeting(b"\xa5" * 5000)),
    Stranger("a web browser", r"announced a frame of", _before_a_greeting(b"GET / HTTP/1.1\r\nHost: pdd\r\n\r\n")),
    Stranger("a frame of no kind", r"what is no frame", _behind_a_greeting(framed(b"\x92\x63\x01"))),
    Stranger(
        "a frame nested 50,000 deep",
        r"what is no frame",
        _behind_a_greeting(framed(b"\x93\x03\x01" + b"\x91" * 50_000 + b"\xc0")),
    ),
    Stranger("an answer nobody asked for", r"result frame", _behind_a_greeting(framed(b"\x93\x02\x01\xc0"))),
    Stranger("a second greeting", r"hello frame", lambda door: _says(door, *[encode(Hello(door.greeting))] * 2)),
    Stranger(
        "a frame before the greeting", r"credit frame out of turn", _before_a_greeting(framed(b"\x93\x06\x01\x01"))
    ),
    Stranger("one that never greets", r"no greeting came", _silent),
    Stranger("one that greets byte by byte", r"no greeting came", _slow),
)
"""Who is refused at any door of the message plane, whatever is behind it."""


def strangers(door: Door) -> tuple[Stranger, ...]:
    """Those that there are at this door."""
    return tuple(each for each in STRANGERS if not each.needs_tls or (door.tls is not None and door.other is not None))


@asynccontextmanager
async def crowd(address: tuple[str, int], count: int, first: bytes = b"") -> AsyncIterator[list[asyncio.StreamWriter]]:
    """`count` connections that say `first` and nothing more, all at once, for as long as the context lasts; fewer where
    this process may not open so many files, or is refused."""
    writers: list[asyncio.StreamWriter] = []
    try:
        for _ in range(count):
            try:
                _, writer = await asyncio.open_connection(*address)
            except OSError:
                break
            writers.append(writer)
            writer.write(first)
        yield writers
    finally:
        for writer in writers:
            writer.transport.abort()
