"""Who gets which variant. Pure: every process that knows the weights says the same, and none has to remember it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import xxhash


class Split:
    """Weighted rendezvous hashing: each variant draws a lot for a key, and the best lot has it (Schindelhauer and
    Schomaker, "Weighted distributed hash tables", SPAA 2005). When weights change, only as many keys move as must, and
    none between two variants whose weights have not changed."""

    def __init__(self, weights: Mapping[str, float], salt: str = "") -> None:
        """Raises `ValueError` where none has a weight. Another `salt` splits the same keys otherwise."""
        self.weights = dict(weights)
        self._drawing = [(name, weight, f"{salt}\0{name}\0") for name, weight in weights.items() if weight > 0]
        if not self._drawing:
            raise ValueError("no variant has a weight")

    def of(self, key: str) -> str:
        """The variant of a key."""
        if len(self._drawing) == 1:
            return self._drawing[0][0]
        return min(self._drawing, key=lambda drawing: _lot(drawing[2] + key) / drawing[1])[0]

    def share(self, name: str) -> float:
        """Of all keys, how many it has, of 1."""
        return self.weights[name] / sum(self.weights.values())


def _lot(text: str) -> float:
    """Exponentially distributed."""
    return -math.log((xxhash.xxh3_64_intdigest(text.encode()) + 1) / (2**64 + 1))
