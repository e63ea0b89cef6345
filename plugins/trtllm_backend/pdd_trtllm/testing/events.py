"""What the stand-in says of its cache: kept until somebody asks, the oldest dropped where nobody does."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any


class Events:
    """In the form of `POST /kv_cache_events`. From any thread."""

    def __init__(self, most: int, *, pages: int, window: int) -> None:
        """`most`: of those that nobody has asked for; 0: none are kept."""
        self._events: deque[dict[str, Any]] = deque(maxlen=most)
        self._window = window
        self._next = 0
        self._lock = threading.Lock()
        self._add({"type": "created", "num_blocks_per_cache_level": [pages, 0]})

    def stored(self, parent: int | None, blocks: Sequence[tuple[int, Sequence[int]]]) -> None:
        """`blocks`: number and tokens of each, the first behind `parent`; None: behind nothing."""
        self._add({"type": "stored", "parent_hash": parent, "blocks": [_block(*block) for block in blocks]})

    def removed(self, numbers: Sequence[int]) -> None:
        self._add({"type": "removed", "block_hashes": list(numbers)})

    def take(self) -> list[dict[str, Any]]:
        """All since the last call."""
        with self._lock:
            taken = list(self._events)
            self._events.clear()
        return taken

    def _add(self, data: dict[str, Any]) -> None:
        with self._lock:
            self._events.append({"event_id": self._next, "data": data, "window_size": self._window})
            self._next += 1


def _block(number: int, tokens: Sequence[int]) -> dict[str, Any]:
    return {
        "type": "stored_block",
        "block_hash": number,
        "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in tokens],
        "cache_level": 0,
        "priority": 35,
    }
