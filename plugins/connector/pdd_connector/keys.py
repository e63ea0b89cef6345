"""Names of pages that an engine can compute from tokens alone, whatever its own request ids are."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def page_key(previous: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the page that holds `tokens` after the page `previous` (`b""` before the first): SHA-256 over it and
    the token ids as little-endian uint32. SGLang names its pages so."""
    ids = array("I", tokens)
    return hashlib.sha256(previous + ids.tobytes()).digest()


def page_keys(tokens: Sequence[int], page: int, previous: bytes = b"") -> tuple[bytes, ...]:
    """One a full page of `page` tokens."""
    keys = []
    for start in range(0, len(tokens) - page + 1, page):
        previous = page_key(previous, tokens[start : start + page])
        keys.append(previous)
    return tuple(keys)
