"""The random number of a position: what makes a seeded answer the same on every route."""

from __future__ import annotations

import struct

import xxhash


def uniform(seed: int, position: int) -> float:
    """The one number in [0, 1) by which the token at `position` is drawn. It depends on nothing else: not on who
    draws, not on what else runs, not on how many numbers were drawn before. Of `seed` the low 64 bits count."""
    key = struct.pack("<QQ", seed & 0xFFFF_FFFF_FFFF_FFFF, position)
    return (xxhash.xxh3_64_intdigest(key) >> 11) * 2.0**-53
