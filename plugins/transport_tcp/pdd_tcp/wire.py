"""What crosses a connection: one hello from the receiver and one answer; then the receiver's messages, and frames from
the sender."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping
from struct import Struct
from typing import Annotated, Literal, NamedTuple

import msgspec
import xxhash

from pdd_runtime.errors import PddError, TransferError
from pdd_runtime.kv import KvLayout
from pdd_runtime.plugins.transport import Subscription, Wanted

MAGIC = b"PDKV"
VERSION = 2
PREFIX = Struct("<4sIIQ")
"""Before each message: magic, version, length and xxh3-64 of the msgpack that follows."""
HELLO_LIMIT = 64 << 10
ANSWER_LIMIT = 64 << 10
MESSAGE_LIMIT = 64 << 20
BLOCKS_LIMIT = 1 << 20
FRAMES_LIMIT = 1 << 22
"""In one subscription; both sides keep 8 bytes for each."""
BLOCK_LIMIT = 1 << 31
"""Bytes of one block."""
SMALLEST_FRAME, LARGEST_FRAME = 4 << 10, 16 << 20
NAME_BYTES = 16
Number = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """A connection's first message. Connections with one channel carry the same fetches."""

    channel: bytes
    """16 random bytes: nobody else can guess them."""
    join: bool
    """Whether the channel is there already."""
    replaces: bytes = b""
    """A channel of the same receiver that broke: what is left of it can go."""
    cluster: str
    """Where the receiver is."""
    secret: str
    """The graph's."""
    beat: float
    """Seconds: the sender lets something be heard at least that often."""
    streams: int
    """Connections that the receiver would keep."""
    index: int = 0
    """Of the receiver's connections, in the order in which it opened them."""

    def __repr__(self) -> str:
        return f"Hello(from {self.cluster})"

    def check(self) -> None:
        """Raises `TransferError` for one that cannot be meant."""
        if len(self.channel) != NAME_BYTES or not self.beat >= 0.01 or self.streams < 1:
            raise refused(f"channel of {len(self.channel)} bytes, beat {self.beat} s, {self.streams} streams")


class Subscribe(msgspec.Struct, frozen=True, kw_only=True, tag="subscribe"):
    """Begins a fetch on a channel. Names and lengths stand in two strings of bytes rather than in a list of objects,
    so that decoding takes no more memory than the message has bytes."""

    number: Number
    """By which the frames of this fetch are known on the channel; each is larger than the one before."""
    request_id: str
    names: bytes
    tokens: bytes
    """Unsigned 32-bit little-endian integers."""
    partial: Mapping[int, bytes]
    """By index, of blocks of which something is there: a bit for each of its frames, the lowest first."""
    layout: KvLayout
    fingerprint: str
    epoch: str
    secret: str
    priority: int
    behind: int
    deadline: float
    waited: float
    """Seconds since the fetch began."""
    opened: int = 0
    alive: tuple[int, ...] = ()
    """Of the channel's connections with an index below `opened`, those that live; the sender may not know yet that
    another is lost, and nothing of this fetch must go there."""
    compression: Literal["off", "blosc2", "auto"] = "off"
    quantize: Literal["off", "int8-channel"] = "off"
    """What the receiver can read, and would have; see the config."""

    def __repr__(self) -> str:
        return f"Subscribe({self.number}: {self.request_id})"

    @classmethod
    def of(
        cls,
        subscription: Subscription,
        number: int,
        partial: Mapping[int, bytes] | None = None,
        waited: float = 0.0,
        compression: Literal["off", "blosc2", "auto"] = "off",
        quantize: Literal["off", "int8-channel"] = "off",
    ) -> Subscribe:
        blocks = subscription.blocks
        return cls(
            number=number,
            request_id=subscription.request_id,
            names=b"".join(block.name for block in blocks),
            tokens=uint(array("I", [block.tokens for block in blocks])).tobytes(),
            partial=partial or {},
            layout=subscription.layout,
            fingerprint=subscription.fingerprint,
            epoch=subscription.epoch,
            secret=subscription.secret,
            priority=subscription.priority,
            behind=subscription.behind,
            deadline=subscription.deadline,
            waited=waited,
            compression=compression,
            quantize=quantize,
        )

    def subscription(self, cluster: str, frame: int) -> Subscription:
        """For a receiver in `cluster`, in frames of `frame` bytes. Raises `TransferError` for one that cannot be
        meant."""
        count, odd = divmod(len(self.names), NAME_BYTES)
        if odd or len(self.tokens) != 4 * count or not 1 <= count <= BLOCKS_LIMIT:
            raise refused(f"{len(self.names)} bytes of names and {len(self.tokens)} of lengths are no list of blocks")
        if not 0.0 < self.deadline < 1e7 or not self.waited >= 0.0 or self.behind < 0:
            raise refused(f"deadline {self.deadline} s, begun {self.waited} s ago, {self.behind} bytes behind")
        size = self.layout.block_bytes
        frames = frames_of(size, frame) if 0 < size < BLOCK_LIMIT else FRAMES_LIMIT + 1
        if count * frames > FRAMES_LIMIT:
            raise refused(f"{count} blocks of {size} bytes are more than {FRAMES_LIMIT} frames of {frame}")
        if any(not 0 <= index < count or len(bits) > (frames + 7) // 8 for index, bits in self.partial.items()):
            raise refused("what is there already is no part of what is asked for")
        tokens = uint(array("I", self.tokens))
        names = (self.names[start : start + NAME_BYTES] for start in range(0, len(self.names), NAME_BYTES))
        return Subscription(
            request_id=self.request_id,
            blocks=tuple(Wanted(name, length) for name, length in zip(names, tokens, strict=True)),
            layout=self.layout,
            fingerprint=self.fingerprint,
            epoch=self.epoch,
            cluster=cluster,
            secret=self.secret,
            priority=self.priority,
            behind=self.behind,
            deadline=self.deadline,
        )


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """No more of this fetch. The sender says on each connection what its last frame was."""

    number: Number


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    cluster: str
    """Where the sender is."""
    streams: int
    """How many connections of the channel the sender takes, this one included."""
    frame: int
    """Blocks cross in frames of so many bytes; the last of a block is shorter."""


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    error: dict[str, str]
    """`PddError.to_wire`."""


Message = Hello | Subscribe | Cancel
Answer = Welcome | Refuse
_message = msgspec.msgpack.Decoder(Message)
_answer = msgspec.msgpack.Decoder(Answer)
_error = msgspec.msgpack.Decoder(dict[str, str])


def refused(why: str) -> TransferError:
    return TransferError("the peer sent something that cannot be meant", why=why, fix="run one version on both sides")


def pack(message: Message | Answer) -> bytes:
    body = msgspec.msgpack.encode(message)
    return PREFIX.pack(MAGIC, VERSION, len(body), checksum_of(body)) + body


def checksum_of(body: bytes | bytearray | memoryview) -> int:
    value: int = xxhash.xxh3_64_intdigest(body)
    return value


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


def unpack_message(body: bytes | bytearray) -> Message:
    try:
        return _message.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, ArithmeticError) as error:
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


DATA, GONE, BEAT, ERROR, END, ENDED = range(6)
_HEAD = Struct("<BBxxIIIIIQQ")
_SUM = Struct("<Q")
FRAME_BYTES = _HEAD.size + _SUM.size
DIGEST_BYTES = 16


class Frame(NamedTuple):
    """A header; a payload of `length` bytes follows."""

    kind: int
    encoding: int
    """How the block is written, as flags of `encoding.py`."""
    fetch: int
    """The subscription's number; 0 in a `BEAT`."""
    block: int
    """Its index in the subscription, in `DATA` and `GONE`."""
    part: int
    """Which of the block's frames."""
    length: int
    size: int
    """Bytes of the whole block as it is written."""
    bind: int
    """Of `DATA` and `GONE` the hash of channel, fetch, request and block name, of `BEAT` that of the channel, else that
    of channel, fetch and request: a frame of another request, or of another block, is never taken for the one asked
    for."""
    body: int
    """xxh3-64 of the payload. The header's own follows it."""


class Binding:
    """What ties frames to one fetch of one request."""

    def __init__(self, channel: bytes, number: int = 0, request_id: str = "") -> None:
        self.session: int = xxhash.xxh3_64_intdigest(channel + number.to_bytes(8, "little") + request_id.encode())

    def block(self, name: bytes) -> int:
        value: int = xxhash.xxh3_64_intdigest(name, self.session)
        return value


def pack_frame(
    kind: int,
    bind: int,
    *,
    fetch: int = 0,
    block: int = 0,
    part: int = 0,
    size: int = 0,
    encoding: int = 0,
    payload: bytes | memoryview = b"",
) -> bytes:
    return seal(kind, bind, fetch, block, part, size, encoding, len(payload), checksum_of(payload))


def seal(
    kind: int, bind: int, fetch: int, block: int, part: int, size: int, encoding: int, length: int, body: int
) -> bytes:
    """A header of a payload whose checksum is known."""
    head = _HEAD.pack(kind, encoding, fetch, block, part, length, size, bind, body)
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def unpack_frame(header: bytes | bytearray) -> Frame | None:
    """None where the header is not what its checksum says."""
    if xxhash.xxh3_64_intdigest(header[: _HEAD.size]) != _SUM.unpack_from(header, _HEAD.size)[0]:
        return None
    return Frame(*_HEAD.unpack_from(header))


def frames_of(size: int, frame: int) -> int:
    """How many frames `size` bytes take."""
    return -(-size // frame)


def digest(sums: array[int]) -> bytes:
    """xxh3-128 over the checksums of a fetch's frames, in the order of blocks and parts; 0 stands for a frame that
    was not sent."""
    return xxhash.xxh3_128_digest(uint(array("Q", sums)).tobytes())


def uint(values: array[int]) -> array[int]:
    """To or from little-endian."""
    if sys.byteorder == "big":
        values.byteswap()
    return values
