"""Frames: what goes over a connection. A 4-byte big-endian length, then msgpack."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec

from pdd_runtime.errors import RpcError
from pdd_runtime.rpc.greeting import Greeting

FRAME_LIMIT = 16 * 2**20
"""Bytes of one frame, without its length."""
GREETING_LIMIT = 64 * 2**10
"""Bytes of the first frame: a stranger gets no more memory than that."""
WINDOW = 64
"""Credits a stream begins with."""
CREDIT_BYTES = 16 * 2**10
"""An item costs one credit, and one more per so many bytes: a window is at most 64 items and about 1 MiB."""
HEADER = 4
MOST_PARTS = 1024
"""Pieces of one frame: a peer that sends byte by byte would have each take fifty."""


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The first frame in each direction."""

    greeting: Greeting


class Call(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Client: begin a call. `id` is new on this connection; `timeout` is what is left, in seconds, None: none."""

    id: int
    method: str
    params: msgspec.Raw
    timeout: float | None
    stream: bool


class Result(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Server: a unary call's answer, its last frame."""

    id: int
    payload: msgspec.Raw


class Item(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Server: one item of a stream."""

    id: int
    payload: msgspec.Raw


class End(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Server: the stream has no more items."""

    id: int


class Failure(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Server: the call failed; `error` is `PddError.to_wire()`."""

    id: int
    error: dict[str, str]


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Client: it has consumed so much more of a stream."""

    id: int
    amount: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Client: the call's outcome is of no interest any more. Nothing answers it."""

    id: int


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Either: a sign of life."""


class Bye(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Either: the last frame; the other side closes. With the reason, where it is an error."""

    error: dict[str, str] | None = None


Frame = Hello | Call | Result | Item | End | Failure | Credit | Cancel | Ping | Bye

_TLS_HANDSHAKE = b"\x16\x03"
"""How it begins: read as a length, that is far over any limit."""
_length = struct.Struct(">I").unpack_from
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)
# RecursionError: nesting deeper than the interpreter's stack, which only garbage or an attack has.
_UNREADABLE = (msgspec.MsgspecError, RecursionError)


def encode(frame: Frame) -> bytes:
    """The frame with its length in front. Raises `RpcError` where it is over the limit."""
    data = _encoder.encode(frame)
    if len(data) > FRAME_LIMIT:
        raise RpcError(
            f"a {type(frame).__name__.lower()} frame of {len(data)} bytes is over the limit of {FRAME_LIMIT}",
            fix="send it in pieces; bulk KV goes over a transport",
        )
    return len(data).to_bytes(HEADER, "big") + data


def pack(value: object) -> msgspec.Raw:
    """A payload, encoded once. Raises TypeError where msgspec cannot encode the value."""
    return msgspec.Raw(_encoder.encode(value))


def cost(payload: msgspec.Raw) -> int:
    """The credits an item takes; both sides count alike."""
    return 1 + len(payload) // CREDIT_BYTES


class PayloadDecoder:
    """Reads payloads straight into one type: a class, or a union of tagged Structs."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)

    def decode(self, payload: msgspec.Raw, what: str) -> Any:
        """Raises `RpcError` naming `what`."""
        try:
            return self._decoder.decode(payload)
        except _UNREADABLE as error:
            raise RpcError(
                f"{what} cannot be read", why=str(error), fix="run the same version of pdd-runtime on both sides"
            ) from None


_cached = lru_cache(maxsize=256)(PayloadDecoder)


def payload_decoder(kind: Any) -> PayloadDecoder:
    """The decoder of a type, made once: making one costs more than using it."""
    return _cached(kind)


class FrameDecoder:
    """Cuts a byte stream into frames. Holds at most one unfinished frame, of at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """May be raised between two frames."""
        self._parts: list[bytes] = []
        self._have = 0
        self._need = HEADER

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that `data` completes. Raises `RpcError` at the first that is too long or no frame; the
        stream cannot be read on then.

        A frame's payload is a view of `data`: decode it at once, or it keeps the whole of `data` in memory.
        """
        self._parts.append(data)
        self._have += len(data)
        if self._have < self._need:
            if len(self._parts) > MOST_PARTS:
                self._parts = [b"".join(self._parts)]
            return
        if len(self._parts) > 1:
            data = b"".join(self._parts)
        self._parts = []
        view = memoryview(data)
        at, end = 0, len(data)
        while end - at >= HEADER:
            (length,) = _length(data, at)
            if length > self.limit:
                if data[at : at + 2] == _TLS_HANDSHAKE:
                    raise RpcError(
                        "the peer speaks TLS, and this side plain text",
                        fix="both sides need spec.security.tls, with certificates of this graph by one CA",
                    )
                raise RpcError(
                    f"the peer announced a frame of {length} bytes; the limit is {self.limit}",
                    why="it runs another version, or is not pdd-runtime at all",
                )
            if end - at - HEADER < length:
                self._need = HEADER + length
                break
            start, at = at + HEADER, at + HEADER + length
            try:
                frame: Frame = _decoder.decode(view[start:at])
            except _UNREADABLE as error:
                raise RpcError("the peer sent what is no frame", why=str(error)) from None
            yield frame
        else:
            self._need = HEADER
        if at < end:
            self._parts = [data[at:]]
        self._have = end - at
