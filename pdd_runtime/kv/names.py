"""Block names: a hash chain over tokens, the same in every engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import xxhash


class Block(NamedTuple):
    """One block of a token sequence, named by its content and all before it."""

    name: bytes
    """16 bytes, xxh3-128."""
    parent: bytes
    """The name of the block before it; the seed for the first."""
    start: int
    """Position of its first token in the sequence."""
    tokens: int
    """How many tokens it holds: `block_size`, or fewer for the partial tail."""


def seed(fingerprint: str, kv_spec: str, *, lora: str = "", salt: str = "") -> bytes:
    """The root of every chain: model, layout-independent KV spec, LoRA and tenant salt.

    Two tenants with different salts never share a block.
    """
    parts = (fingerprint, kv_spec, lora, salt)
    return xxhash.xxh3_128_digest(b"".join(len(p.encode()).to_bytes(4, "little") + p.encode() for p in parts))


def child(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of the block that holds `tokens` after `parent`."""
    return xxhash.xxh3_128_digest(parent + array("I", tokens).tobytes())


def chain(root: bytes, tokens: Sequence[int], block_size: int) -> list[Block]:
    """The blocks of a whole sequence, in order; the last may be partial."""
    blocks: list[Block] = []
    parent = root
    for start in range(0, len(tokens), block_size):
        piece = tokens[start : start + block_size]
        name = child(parent, piece)
        blocks.append(Block(name, parent, start, len(piece)))
        parent = name
    return blocks
