"""Recorded block ids as chains."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pdd_runtime.planner.content import leading
from pdd_runtime.planner.session import Spans


class Chains:
    """A compressed trie of all prompts so far: an id names a block with all that stands before it, so that a request
    knows as many leading blocks as it has ids that came up earlier. Memory grows with the ids."""

    def __init__(self, block: int) -> None:
        """`block`: tokens of a block."""
        self._block = block
        self._known: dict[Hashable, tuple[int, int]] = {}
        """Of each id: its chain, and how much of it has passed at the block's end."""

    def spans(self, ids: Sequence[Hashable], prompt: int, own: int) -> Spans:
        """Of a prompt of so many tokens with these blocks, the last maybe not whole; tokens behind them are nobody
        else's. What is new becomes the chain `own`; that is a token at least."""
        found: list[tuple[int, int]] = []
        known = passed = end = 0
        for block_id in ids:
            place = self._known.get(block_id)
            if place is None or known >= prompt:
                break
            passed += 1
            chain, reach = place
            begin = found.pop()[1] if found and found[-1][0] == chain else 0
            held, asked = reach - begin, min(self._block, prompt - known)
            found.append((chain, begin + min(held, asked)))
            known += min(held, asked)
            if held < self._block:
                end = max(0, asked - held)
                break
        for block_id in ids[passed:]:
            end = min(end + self._block, prompt - known)
            self._known.setdefault(block_id, (own, end))
        fresh = max(1, prompt - known)
        return (*leading(tuple(found), prompt - fresh), (own, fresh))
