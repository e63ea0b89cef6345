"""What the server says of its cache becomes names of blocks, and never one too many."""

from __future__ import annotations

from typing import Any

import pytest
from pdd_trtllm.events import CacheEvents

from pdd_runtime.kv import CachedNames, KvLayout
from pdd_runtime.kv.names import chain
from pdd_runtime.server.cached_pages import CachedPages

SIZE = 4
ROOT = b"root"
LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=8, dtype="float32", block_size=SIZE)
PROMPT = tuple(range(100, 100 + 4 * SIZE))


class Told:
    """Answers of a server, taken one after another."""

    def __init__(self) -> None:
        self.names = CachedNames(LAYOUT)
        self._events = CacheEvents(CachedPages(self.names, lambda salt: ROOT), SIZE)
        self._number = 0

    def take(self, *data: dict[str, Any], skipped: int = 0) -> None:
        self._number += skipped
        events = [{"event_id": self._number + index, "data": one, "window_size": 64} for index, one in enumerate(data)]
        self._number += len(data)
        self._events.take(events)

    @property
    def blocks(self) -> int:
        """Of the prompt, from its beginning."""
        return self.names.cached(ROOT, PROMPT) // SIZE


def stored(first: int, last: int, *, size: int = SIZE, **more: Any) -> dict[str, Any]:
    """Blocks `first` to `last` of the prompt, each the hash of its number; the last has `size` tokens."""
    blocks = []
    for index in range(first, last):
        end = index * SIZE + (size if index == last - 1 else SIZE)
        tokens = [
            {"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in PROMPT[index * SIZE : end]
        ]
        blocks.append({"type": "stored_block", "block_hash": index, "tokens": tokens, "cache_level": 0} | more)
    return {"type": "stored", "parent_hash": None if first == 0 else first - 1, "blocks": blocks}


def removed(*numbers: int) -> dict[str, Any]:
    return {"type": "removed", "block_hashes": list(numbers)}


def test_blocks_have_the_names_that_every_engine_gives_them() -> None:
    told = Told()
    told.take({"type": "created", "num_blocks_per_cache_level": [8, 0]}, stored(0, 2), stored(2, 4))
    assert set(told.names.names()) == {block.name for block in chain(ROOT, PROMPT, SIZE)}
    told.take(removed(3))
    assert told.blocks == 3


def test_a_block_that_is_not_full_has_no_name() -> None:
    told = Told()
    told.take(stored(0, 3, size=2))
    assert told.blocks == 2


@pytest.mark.parametrize("more", [{"mm_keys": ["image"]}, {"cache_salt": "tenant"}, {"lora_id": 3}])
def test_what_is_not_of_tokens_alone_is_left_out(more: dict[str, Any]) -> None:
    told = Told()
    told.take(stored(0, 1), stored(1, 3, **more), stored(3, 4))
    assert told.blocks == 1
    assert len(told.names) == 1


def test_a_token_of_something_else_is_none() -> None:
    told = Told()
    event = stored(0, 2)
    event["blocks"][1]["tokens"][0]["token_extra_id"] = 9
    told.take(event)
    assert told.blocks == 1


def test_what_stands_behind_an_unknown_block_is_left_out() -> None:
    told = Told()
    told.take(stored(1, 3))
    assert len(told.names) == 0


def test_after_a_gap_nothing_is_taken_for_cached() -> None:
    """A block may have gone with the events that are lost."""
    told = Told()
    told.take(stored(0, 4))
    told.take(removed(99), skipped=1)
    assert len(told.names) == 0
    told.take(stored(0, 2))
    assert told.blocks == 2


def test_a_server_that_began_anew_has_nothing() -> None:
    told = Told()
    told.take(stored(0, 4))
    told.take({"type": "created", "num_blocks_per_cache_level": [8, 0]})
    assert len(told.names) == 0


def test_a_block_that_moves_is_found_all_the_same() -> None:
    told = Told()
    level = {"type": "event_diff", "old_value": 0, "new_value": 1}
    told.take(stored(0, 2), {"type": "updated", "block_hash": 1, "cache_level": level, "priority": None})
    assert told.blocks == 2


@pytest.mark.parametrize("answer", [None, [{}], [{"event_id": 0, "data": {"type": "stored"}}], {"error": "no"}])
def test_what_has_another_form_is_an_error(answer: Any) -> None:
    with pytest.raises(ValueError, match="another form"):
        CacheEvents(CachedPages(CachedNames(LAYOUT), lambda salt: ROOT), SIZE).take(answer)
