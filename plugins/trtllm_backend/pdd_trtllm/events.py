"""What TensorRT-LLM answers at `POST /kv_cache_events`: whoever asks has taken the events from all others."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from pdd_runtime.server.cached_pages import CachedPages

log = logging.getLogger(__name__)


class CacheEvents:
    """Takes answers one after another, and keeps `pages` up to date."""

    def __init__(self, pages: CachedPages, size: int) -> None:
        """`size`: tokens in a page. Pages are found by their last full one; the rest of a prompt is none."""
        self._pages, self._size = pages, size
        self._next: int | None = None

    def take(self, answer: Any) -> None:
        """Raises `ValueError` for what is no such answer."""
        try:
            for event in answer:
                number = event["event_id"]
                if number != self._next:
                    if self._next is not None:
                        log.warning("events %d to %d of the server's cache are lost", self._next, number - 1)
                    # What has gone since may be among what is lost.
                    self._pages.clear()
                self._next = number + 1
                self._apply(event["data"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"TensorRT-LLM tells of its cache in another form: {error!r}") from error

    def _apply(self, data: dict[str, Any]) -> None:
        match data["type"]:
            case "stored":
                blocks = list(self._full(data["blocks"]))
                tokens = [token for _, block in blocks for token in block]
                if blocks:
                    self._pages.stored([key for key, _ in blocks], data["parent_hash"], tokens, self._size)
            case "removed":
                self._pages.removed(data["block_hashes"])
            case "created":
                self._pages.clear()
            # "updated": it lies elsewhere, or is dearer; it is still found.

    def _full(self, blocks: list[dict[str, Any]]) -> Iterator[tuple[int, list[int]]]:
        """Hash and tokens, up to the first that is not full, or not of tokens alone: of an adapter, an image, or a
        tenant of the server's own."""
        for block in blocks:
            tokens = block["tokens"]
            extra = any(token["token_extra_id"] for token in tokens) or block.get("mm_keys") or block.get("lora_id")
            salted = block.get("cache_salt") or block.get("cache_salt_id")
            if len(tokens) != self._size or extra or salted:
                return
            yield block["block_hash"], [token["token_id"] for token in tokens]
