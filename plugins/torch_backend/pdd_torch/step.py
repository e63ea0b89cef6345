"""One forward pass: what the scheduler asks of the model, and what comes back. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from pdd_runtime.plugins.engine import Sampling


@dataclass(frozen=True)
class Chunk:
    """Known tokens of one sequence whose KV is to be made."""

    tokens: tuple[int, ...]
    start: int
    """Position of the first."""
    blocks: tuple[int, ...]
    """The sequence's blocks, from its beginning to the last of `tokens`."""
    sampling: Sampling | None
    """How to choose the token behind the last one; None: none is wanted."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)
