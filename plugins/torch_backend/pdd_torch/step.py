"""One forward pass: what the scheduler asks of the model, and what comes back. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdd_torch.sampler import Sampler


@dataclass(frozen=True)
class Chunk:
    """Known tokens of one sequence whose KV is to be made."""

    tokens: tuple[int, ...]
    start: int
    """Position of the first."""
    blocks: tuple[int, ...]
    """The sequence's blocks, from its beginning to the last of `tokens`."""
    sampling: Sampler | None
    """Chooses the token behind the last one; None: none is wanted."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)
