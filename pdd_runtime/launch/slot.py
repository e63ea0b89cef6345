"""A place in a graph that one process fills."""

from __future__ import annotations

from dataclasses import dataclass

FRONTEND = "frontend"


@dataclass(frozen=True, order=True)
class Slot:
    """`main/0`; its process changes with every epoch."""

    pool: str
    """Or `frontend`."""
    index: int

    def __str__(self) -> str:
        return f"{self.pool}/{self.index}"
