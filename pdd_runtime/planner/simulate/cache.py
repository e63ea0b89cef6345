"""A worker's KV cache, as a simulation knows it: how much of which chain is there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Final, TypeAlias

Spans: TypeAlias = Sequence[tuple[int, int]]
"""A sequence of tokens: (chain, tokens) each, the leading tokens of one chain behind those of the one before. A chain
always follows the same tokens."""

PIECES: Final = 256
"""What nobody will ask for is kept in about so many pieces, each as old as the oldest in it."""


class Chain:
    """What is cached of one chain: its leading tokens. Those that were used last lie in front."""

    __slots__ = ("base", "children", "number", "parent", "pinned", "pins", "queued", "start", "used")

    def __init__(self, number: int, parent: Chain | None, base: int, start: int) -> None:
        self.number, self.parent = number, parent
        self.base = base
        """Tokens of the parent that it follows."""
        self.start = start
        """Tokens before it in the sequence."""
        self.used: list[tuple[int, int]] = []
        """(end, when): tokens up to `end` were last used then; the longest first, so that times grow along the list."""
        self.children: dict[int, int] = {}
        """Cached chains that follow it, by how many tokens of it they follow."""
        self.pins: dict[int, int] = {}
        """Requests in flight that hold so many tokens of it."""
        self.pinned = 0
        """The most tokens of it that one of them holds."""
        self.queued = False
        """It stands in the eviction queue."""

    @property
    def kept(self) -> int:
        """Tokens of it that cannot go: somebody holds them, or something follows them."""
        return max(self.pinned, max(self.children, default=0))

    def blocks(self, tokens: int, block: int) -> int:
        """In how many blocks its first `tokens` tokens lie; it has the block in which it begins for itself."""
        return (self.start + tokens + block - 1) // block - self.start // block if tokens else 0


class SimCache:
    """A radix cache over blocks of `block` tokens, with room for `capacity` tokens. What was used longest ago goes
    first, from the tails of chains; nothing goes that is pinned, or that something cached follows. As
    `pdd_runtime.kv.index`, except that blocks are not made one by one: O(spans) a request.

    A block in which two sequences part is not shared. A sequence's last block, partly full, is found again by whoever
    goes on behind its end."""

    __slots__ = (
        "_chains", "_filled", "_holders", "_place", "_queue", "_tick", "block", "capacity", "evicted", "pinned",
        "used",
    )  # fmt: skip

    def __init__(self, capacity: int, block: int, holders: dict[int, set[int]] | None = None, place: int = 0) -> None:
        """`holders`: by chain, the places of caches that have something of it; this one keeps its own `place` in it."""
        if capacity < 0 or block < 1:
            raise ValueError(f"no such cache: {capacity} tokens in blocks of {block}")
        self.capacity, self.block = capacity, block
        self._holders: dict[int, set[int]] = {} if holders is None else holders
        self._place = place
        self.used = 0
        """Tokens in its blocks, of which the last of a sequence may be partly full."""
        self.pinned = 0
        """Of `used`: what cannot go."""
        self.evicted = 0
        """Tokens in blocks that had to go so far."""
        self._chains: dict[int, Chain] = {}
        self._filled: deque[tuple[int, int]] = deque()
        """(when, tokens) of what nobody will ask for, oldest first."""
        self._queue: list[tuple[int, int, Chain]] = []
        """A heap of (stamp, number, chain), a chain at most once; a stamp may be out of date, and is put right when it
        comes up."""
        self._tick = 0

    def __contains__(self, chain: int) -> bool:
        return chain in self._chains

    def hit(self, spans: Spans) -> int:
        """How many leading tokens are cached. Counts as no use."""
        chains, hit, exact = self._chains, 0, True
        for number, tokens in spans:
            chain = chains.get(number)
            end = chain.used[0][0] if chain is not None else 0
            if end < tokens:
                # Up to the end of what is there its last block fits; where sequences part inside a block, it does not.
                hit += end
                return hit if end or exact else hit - hit % self.block
            hit += tokens
            exact = end == tokens
        return hit if exact else hit - hit % self.block

    def take(self, spans: Spans, pinned: bool = False) -> None:
        """All of it is cached from now on, and was used now; with `pinned` it stays until `release(spans)`.

        What has to go for it goes. Where all else is pinned the cache overflows."""
        self._tick += 1
        tick, block, chains = self._tick, self.block, self._chains
        parent: Chain | None = None
        base = start = 0
        for number, tokens in spans:
            if not tokens:
                continue
            chain = chains.get(number)
            if chain is None:
                chain = chains[number] = Chain(number, parent, base, start)
                holders = self._holders.get(number)
                if holders is None:
                    self._holders[number] = {self._place}
                else:
                    holders.add(self._place)
                if parent is not None:
                    parent.children[base] = parent.children.get(base, 0) + 1
            used = chain.used
            end = used[0][0] if used else 0
            if tokens >= end:
                if tokens > end:
                    self.used += (chain.blocks(tokens, block) - chain.blocks(end, block)) * block
                used.clear()
                used.append((tokens, tick))
            else:
                while used and used[-1][0] <= tokens:
                    used.pop()
                used.append((tokens, tick))
            if pinned:
                chain.pins[tokens] = chain.pins.get(tokens, 0) + 1
                if tokens > chain.pinned:
                    self._pin(chain, tokens)
            parent, base = chain, tokens
            start += tokens
        if parent is not None:
            self._enqueue(parent)
        over = self.used - self.capacity
        if over > 0:
            self._evict(over)

    def fill(self, tokens: int) -> None:
        """So many tokens are cached that no request will ask for again. They go like others, when they are oldest."""
        self._tick += 1
        room = tokens + -tokens % self.block
        filled = self._filled
        if filled and filled[-1][1] * PIECES < self.capacity:
            since, had = filled[-1]
            filled[-1] = since, had + room
        else:
            filled.append((self._tick, room))
        self.used += room
        over = self.used - self.capacity
        if over > 0:
            self._evict(over)

    def release(self, spans: Spans) -> None:
        """Whoever took it with `pinned` needs it no longer; that was its last use. Raises `KeyError` where nobody
        holds it so."""
        self._tick += 1
        for number, tokens in spans:
            if not tokens:
                continue
            chain = self._chains[number]
            pins = chain.pins
            if pins[tokens] > 1:
                pins[tokens] -= 1
            else:
                del pins[tokens]
                if tokens == chain.pinned:
                    self._pin(chain, max(pins, default=0))
            used = chain.used
            while used and used[-1][0] <= tokens:
                used.pop()
            used.append((tokens, self._tick))
            self._enqueue(chain)
        over = self.used - self.capacity
        if over > 0:
            self._evict(over)

    def clear(self) -> None:
        """All is lost, as when the worker dies; also what was pinned."""
        for number in self._chains:
            self._unheld(number)
        self._chains.clear()
        self._filled.clear()
        self._queue.clear()
        self.used = self.pinned = 0

    def _pin(self, chain: Chain, tokens: int) -> None:
        block = self.block
        self.pinned += (chain.blocks(tokens, block) - chain.blocks(chain.pinned, block)) * block
        chain.pinned = tokens

    def _evict(self, tokens: int) -> None:
        """Until so many tokens' blocks have gone, or none is left that can."""
        queue, filled, block = self._queue, self._filled, self.block
        gone = 0
        while gone < tokens and (queue or filled):
            if filled and (not queue or filled[0][0] < queue[0][0]):
                since, room = filled.popleft()
                going = min(room, tokens - gone + -(tokens - gone) % block)
                gone += going
                if going < room:
                    filled.appendleft((since, room - going))
                continue
            stamp, _, chain = heappop(queue)
            chain.queued = False
            used = chain.used
            if not used:
                continue
            if stamp != used[0][1]:
                self._enqueue(chain)
                continue
            kept, end = chain.kept, used[0][0]
            if kept >= end:
                continue
            # Its tail, as far as it was used no later; no further than needed, in whole blocks.
            least = max(kept, used[1][0] if len(used) > 1 else 0)
            last = (chain.start + end + block - 1) // block - (tokens - gone + block - 1) // block
            left = max(least, last * block - chain.start)
            gone += (chain.blocks(end, block) - chain.blocks(left, block)) * block
            if not left:
                self._forget(chain)
                continue
            if len(used) > 1 and left == used[1][0]:
                used.pop(0)
            else:
                used[0] = (left, used[0][1])
            self._enqueue(chain)
        self.used -= gone
        self.evicted += gone

    def _forget(self, chain: Chain) -> None:
        chain.used.clear()
        del self._chains[chain.number]
        self._unheld(chain.number)
        parent = chain.parent
        if parent is None:
            return
        children = parent.children
        if children[chain.base] > 1:
            children[chain.base] -= 1
        else:
            del children[chain.base]
        self._enqueue(parent)

    def _unheld(self, number: int) -> None:
        holders = self._holders[number]
        holders.discard(self._place)
        if not holders:
            del self._holders[number]

    def _enqueue(self, chain: Chain) -> None:
        if not chain.queued and chain.used and chain.kept < chain.used[0][0]:
            chain.queued = True
            heappush(self._queue, (chain.used[0][1], chain.number, chain))
