"""One sequence's part of a forward pass, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """Known tokens of one sequence whose KV is to be made."""

    sequence: int
    """Its number in this engine; no other sequence ever has it."""
    tokens: tuple[int, ...]
    start: int
    """Position of the first."""
    blocks: tuple[int, ...]
    """The sequence's blocks, from its beginning to the last of `tokens`."""
    samples: bool
    """Whether the token behind the last one is wanted."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)
