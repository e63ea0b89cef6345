"""The chips of one worker, as a pool's `hardware` says them: `H100`, `32xH100`."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CHIPS = re.compile(r"(?:(\d{1,5})\s*[x×*]\s*)?([A-Za-z][A-Za-z0-9._-]{0,62})")


@dataclass(frozen=True)
class Chips:
    """So many chips of one kind; one worker runs on all of them."""

    count: int
    hardware: str

    @staticmethod
    def parse(text: str) -> Chips:
        """Raises `ValueError`, which says what would be right."""
        match = _CHIPS.fullmatch(text.strip())
        if match is None or int(match[1] or 1) < 1:
            raise ValueError("it must be a kind of chip, or how many of it a worker runs on: H100, or 8xH100")
        return Chips(int(match[1] or 1), match[2])

    def __str__(self) -> str:
        return self.hardware if self.count == 1 else f"{self.count}x{self.hardware}"
