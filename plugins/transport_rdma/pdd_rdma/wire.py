"""What the two sides say to each other over the message plane. The blocks themselves are read through NIXL."""

from __future__ import annotations

import msgspec
import xxhash

from pdd_runtime.plugins.transport import Subscription

VERSION = 1
BLOCKS_LIMIT = 1 << 18
"""Of one subscription, so that it fits into a frame of the message plane. A fetch of more asks several times."""
FIRST_PIECE, PIECE = 1 << 20, 32 << 20
"""Bytes of an offer at most, where it has more than one block: what is read at once. Each is larger than the one
before, so that reading begins soon and messages are few."""

MEET, FEED, TAKEN = "rdma.meet", "rdma.feed", "rdma.taken"


class Meet(msgspec.Struct, frozen=True):
    """Asks for a `Meeting`, once a connection: what it says is true for as long as the connection holds."""

    version: int = VERSION


class Meeting(msgspec.Struct, frozen=True, kw_only=True):
    """How to read a worker's block memory."""

    agent: str
    metadata: bytes
    address: int
    size: int
    kind: str
    device: int


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Opens a session; a stream of `Offer`s answers. The first, empty one says that it is accepted; the stream ends
    when all is taken or gone."""

    fetch: bytes
    """16 random bytes: no two sessions share them, and nobody else can guess them."""
    subscription: Subscription
    checksums: bool


class Offered(msgspec.Struct, frozen=True, array_like=True):
    """A block to be read. It is held until it is taken, or the stream ends."""

    index: int
    """In the subscription."""
    number: int
    """In the sender's memory: of its blocks of this size, counted from the beginning."""
    checksum: int
    """xxh3-64 of the bytes, seeded with that of the name; 0 where none was asked for."""


class Offer(msgspec.Struct, frozen=True, array_like=True):
    blocks: list[Offered] = []
    gone: list[int] = []
    """Indices of blocks that will not come."""


class Taken(msgspec.Struct, frozen=True, array_like=True):
    """These blocks are read: they need not be held. Answered with how many; refused where the session has ended, so
    that what was read may be something else by now."""

    fetch: bytes
    indices: list[int]


def checksum(name: bytes, memory: memoryview) -> int:
    """Seeded with the name: a block that was read in another's place is not taken for it."""
    return xxhash.xxh3_64_intdigest(memory, xxhash.xxh3_64_intdigest(name))
