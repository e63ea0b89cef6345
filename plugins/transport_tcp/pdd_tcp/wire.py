"""What crosses a connection: one hello from the receiver, one answer, then frames from the sender."""

from __future__ import annotations

from array import array
from struct import Struct
from typing import NamedTuple

import msgspec
import xxhash

from pdd_runtime.errors import PddError, TransferError
from pdd_runtime.kv import KvLayout
from pdd_runtime.plugins.transport import Subscription, Wanted

MAGIC = b"PDKV"
VERSION = 1
PREFIX = Struct("<4sIIQ")
"""Before hello and answer: magic, version, length and xxh3-64 of the msgpack that follows."""
HELLO_LIMIT = 64 << 20
ANSWER_LIMIT = 64 << 10
BLOCKS_LIMIT = 1 << 20
NAME_BYTES = 16


class Subscribe(msgspec.Struct, frozen=True, kw_only=True, tag="subscribe"):
    """Opens a session on its first stream. Names and lengths stand in two strings of bytes rather than in a list of
    objects, so that decoding a hello takes no more memory than it has bytes."""

    fetch: bytes
    """16 random bytes: no two fetches share a session, and nobody else can guess it."""
    beat: float
    """Seconds: the sender lets something be heard at least that often."""
    request_id: str
    names: bytes
    tokens: bytes
    """Unsigned 32-bit little-endian integers."""
    layout: KvLayout
    fingerprint: str
    epoch: str
    cluster: str
    secret: str
    priority: int
    deadline: float

    def __repr__(self) -> str:
        return f"Subscribe({self.request_id})"

    @classmethod
    def of(cls, subscription: Subscription, fetch: bytes, beat: float) -> Subscribe:
        blocks = subscription.blocks
        return cls(
            fetch=fetch,
            beat=beat,
            request_id=subscription.request_id,
            names=b"".join(block.name for block in blocks),
            tokens=_uint32(array("I", [block.tokens for block in blocks])).tobytes(),
            layout=subscription.layout,
            fingerprint=subscription.fingerprint,
            epoch=subscription.epoch,
            cluster=subscription.cluster,
            secret=subscription.secret,
            priority=subscription.priority,
            deadline=subscription.deadline,
        )

    def subscription(self) -> Subscription:
        """Raises `TransferError` for one that cannot be meant."""
        count, odd = divmod(len(self.names), NAME_BYTES)
        if odd or len(self.tokens) != 4 * count or not 1 <= count <= BLOCKS_LIMIT:
            raise refused(f"{len(self.names)} bytes of names and {len(self.tokens)} of lengths are no list of blocks")
        if len(self.fetch) != NAME_BYTES or not self.beat >= 0.01 or not 0.0 < self.deadline < 1e7:
            raise refused(f"deadline {self.deadline} s, beat {self.beat} s")
        tokens = _uint32(array("I", self.tokens))
        names = (self.names[start : start + NAME_BYTES] for start in range(0, len(self.names), NAME_BYTES))
        return Subscription(
            request_id=self.request_id,
            blocks=tuple(Wanted(name, length) for name, length in zip(names, tokens, strict=True)),
            layout=self.layout,
            fingerprint=self.fingerprint,
            epoch=self.epoch,
            cluster=self.cluster,
            secret=self.secret,
            priority=self.priority,
            deadline=self.deadline,
        )


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """One more stream for a session that was accepted."""

    fetch: bytes


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    streams: int
    """How many streams of the fetch the sender takes, this one included."""


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    error: dict[str, str]
    """`PddError.to_wire`."""


Hello = Subscribe | Attach
Answer = Accept | Refuse
_hello = msgspec.msgpack.Decoder(Hello)
_answer = msgspec.msgpack.Decoder(Answer)
_error = msgspec.msgpack.Decoder(dict[str, str])


def refused(why: str) -> TransferError:
    return TransferError("the peer sent something that cannot be meant", why=why, fix="run one version on both sides")


def pack(message: Hello | Answer) -> bytes:
    body = msgspec.msgpack.encode(message)
    return PREFIX.pack(MAGIC, VERSION, len(body), checksum_of(body)) + body


def checksum_of(body: bytes | bytearray) -> int:
    return xxhash.xxh3_64_intdigest(body)


def unpack_prefix(data: bytes, limit: int) -> tuple[int, int]:
    """Length and checksum of what follows. Raises `TransferError` for another protocol or version, or past `limit`."""
    magic, version, length, checksum = PREFIX.unpack(data)
    if magic != MAGIC:
        raise TransferError("the peer does not speak this protocol", why=f"it began with {data[:4]!r}, not {MAGIC!r}")
    if version != VERSION:
        raise TransferError(
            f"the peer speaks version {version} of the protocol, and this side version {VERSION}",
            fix="run one version on both sides",
        )
    if length > limit:
        raise refused(f"a message of {length} bytes, where {limit} are allowed")
    return length, checksum


def unpack_hello(body: bytes | bytearray) -> Hello:
    try:
        return _hello.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise refused(str(error)) from error


def unpack_answer(body: bytes | bytearray) -> Answer:
    try:
        return _answer.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise refused(str(error)) from error


def pack_error(error: PddError) -> bytes:
    return msgspec.msgpack.encode(short(error))


def unpack_error(body: bytes | bytearray) -> PddError:
    try:
        return PddError.from_wire(_error.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise refused(str(error)) from error


def short(error: PddError) -> dict[str, str]:
    """The error for the wire, within `ANSWER_LIMIT` however long its texts are."""
    return {key: text[:2000] for key, text in error.to_wire().items()}


DATA, GONE, BEAT, ERROR = range(4)
_FRAME = Struct("<BxxxIIQ")
_CHECKSUM = Struct("<Q")
FRAME_BYTES = _FRAME.size + _CHECKSUM.size


class Frame(NamedTuple):
    """A header; a payload of `length` bytes follows."""

    kind: int
    block: int
    """Its index in the subscription; 0 in a `BEAT` or `ERROR`."""
    length: int
    bind: int
    """Of `DATA` and `GONE` the hash of fetch, request and block name, else that of fetch and request: a frame of
    another request, or of another block, is never taken for the one asked for."""
    checksum: int
    """xxh3-64 of the payload, seeded with the xxh3-64 of the header before it."""


class Binding:
    """What ties frames to one fetch of one request."""

    def __init__(self, fetch: bytes, request_id: str) -> None:
        self.session: int = xxhash.xxh3_64_intdigest(fetch + request_id.encode())

    def block(self, name: bytes) -> int:
        return xxhash.xxh3_64_intdigest(name, self.session)


def pack_frame(kind: int, bind: int, *, block: int = 0, payload: bytes | memoryview = b"") -> bytes:
    head = _FRAME.pack(kind, block, len(payload), bind)
    return head + _CHECKSUM.pack(_checksum(head, payload))


def unpack_frame(header: bytes | bytearray) -> Frame:
    return Frame(*_FRAME.unpack_from(header), *_CHECKSUM.unpack_from(header, _FRAME.size))


def intact(header: bytes | bytearray, payload: bytes | bytearray | memoryview = b"") -> bool:
    """Whether header and payload are what their checksum says."""
    expected: int = _CHECKSUM.unpack_from(header, _FRAME.size)[0]
    return _checksum(header[: _FRAME.size], payload) == expected


def _checksum(head: bytes | bytearray, payload: bytes | bytearray | memoryview) -> int:
    return xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(head))


def _uint32(values: array[int]) -> array[int]:
    """To or from little-endian."""
    if array("H", [1]).tobytes() != b"\x01\x00":
        values.byteswap()
    return values
