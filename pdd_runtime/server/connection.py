"""A connector's connection to its worker, and what is said over it."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

VERSION = 2
LIMIT = 1 << 20
"""Bytes of the largest message that a connector sends."""
_LENGTH = struct.Struct("<I")


class Geometry(msgspec.Struct, frozen=True):
    """The KV that an engine holds, as its connector says."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_size: int = 0
    """Tokens in a page, where a block must be a page; 0: blocks of any size will do."""
    capacity: int = 0
    """Tokens in the engine's own cache."""


class Hello(msgspec.Struct, frozen=True):
    version: int
    engine: str
    role: Literal["scheduler", "worker"]
    rank: int
    ranks: int
    pid: int
    tokens: bool
    geometry: Geometry | None = None

    def misfit(self, expected: Geometry, ranks: int) -> str:
        """Why it is refused; empty: it is not."""
        if self.version != VERSION:
            return f"it speaks version {self.version} of the protocol, this worker {VERSION}: install the same release"
        if self.ranks != ranks:
            return f"the engine has {self.ranks} tensor-parallel ranks, the graph says tp: {ranks}"
        if self.role == "worker" and self.geometry is None:
            return "it does not say what its KV is"
        for field in ("layers", "kv_heads", "head_dim", "dtype", "block_size"):
            ours, theirs = getattr(expected, field), getattr(self.geometry, field, None)
            if self.geometry is not None and ours != theirs and not (field == "block_size" and theirs == 0):
                return f"{field}: the engine has {theirs}, the model's directory and the graph say {ours}"
        return ""


class Notice(msgspec.Struct, frozen=True):
    """What a connection says of a transfer. `tokens` is that of all ranks together: the least."""

    kind: Literal["planned", "loaded", "written", "finished"]
    tokens: int
    local: int = 0
    """`planned` only: tokens in the engine's own cache, before those that are loaded."""


class Announced(msgspec.Struct, frozen=True):
    """A transfer, as `pdd_connector.Transfer` has it."""

    id: str
    ids: tuple[int, ...]
    offered: int
    first: int
    blocks: tuple[int, ...]
    salt: str = ""


class Connection:
    """One process of the engine."""

    def __init__(self, hello: Hello, writer: asyncio.StreamWriter) -> None:
        self.hello, self._writer = hello, writer

    def send(self, message: dict[str, Any]) -> None:
        body = msgspec.json.encode(message)
        self._writer.write(_LENGTH.pack(len(body)) + body)

    def close(self) -> None:
        self._writer.close()


class Line:
    """One transfer while it is announced: who has taken note of it, and what is said of it."""

    def __init__(self, announced: Announced, on_notice: Callable[[Notice], None]) -> None:
        self.announced, self.on_notice = announced, on_notice
        self.waiting: set[Connection] = set()
        """Those that have not answered the last word about it."""
        self.answered = asyncio.Event()
        self.said: dict[str, dict[int, int]] = {}
        """Kind of notice → rank → tokens."""

    def ask(self, connections: Iterator[Connection]) -> None:
        self.waiting = set(connections)
        self.answered.clear()
        self._check()

    def answer(self, connection: Connection) -> None:
        self.waiting.discard(connection)
        self._check()

    def _check(self) -> None:
        if not self.waiting:
            self.answered.set()


class Bare:
    """Reads exactly from a socket that is no stream yet: not a byte more, for the stream reads on."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    async def readexactly(self, n: int) -> bytes:
        loop, data = asyncio.get_running_loop(), b""
        while len(data) < n:
            piece = await loop.sock_recv(self._sock, n - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data


async def read_message(reader: asyncio.StreamReader | Bare) -> dict[str, Any]:
    """Raises `EOFError`, `ValueError`, `msgspec.DecodeError`."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > LIMIT:
        raise ValueError(f"a message of {length} bytes, where {LIMIT} is the limit")
    return msgspec.json.decode(await reader.readexactly(length), type=dict[str, Any])


def count(message: dict[str, Any], field: str) -> int:
    value = message[field]
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{field}: {value!r} is no count")
    return value
