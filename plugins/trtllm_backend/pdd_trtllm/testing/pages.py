"""Pages of KV in the stand-in's cache: whose they are, and which of them later requests find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

Key = tuple[int, ...]


class Node:
    """A full page of a known prefix."""

    def __init__(self, parent: Node | None, key: Key, page: int) -> None:
        self.parent, self.key, self.page = parent, key, page
        self.children: dict[Key, Node] = {}
        self.users = 0
        self.used = 0


class Held:
    """The pages of one request, in order of position: first shared ones, then its own."""

    def __init__(self) -> None:
        self.nodes: list[Node | None] = []
        """Of each page; None: it is the request's own."""
        self.pages: list[int] = []


class PageCache:
    """Hands out pages, keeps full ones for reuse (whole pages only), and takes back what nobody uses."""

    def __init__(self, pages: int, tokens: int) -> None:
        self.count, self.tokens = pages, tokens
        self._free = list(range(pages))
        self._root = Node(None, (), -1)
        self._clock = count(1)

    @property
    def free(self) -> int:
        """Pages that can be had: nobody's, or kept for reuse alone."""
        return len(self._free) + sum(1 for node in self._nodes() if not node.users)

    @property
    def used(self) -> int:
        return self.count - self.free

    def begin(self, tokens: Sequence[int]) -> tuple[Held, int]:
        """Pages for a prompt, and how many tokens of it they hold already: at least one is left to compute."""
        held, node = Held(), self._root
        for key in self._keys(tokens[:-1]):
            child = node.children.get(key)
            if child is None:
                break
            child.users += 1
            child.used = next(self._clock)
            held.nodes.append(child)
            held.pages.append(child.page)
            node = child
        found = len(held.pages) * self.tokens
        self.grow(held, len(tokens))
        return held, found

    def grow(self, held: Held, tokens: int) -> None:
        """Room for `tokens` tokens."""
        while len(held.pages) * self.tokens < tokens:
            held.pages.append(self._take())
            held.nodes.append(None)

    def keep(self, held: Held, tokens: Sequence[int]) -> None:
        """Full pages of `tokens`, all of them computed, are found from now on. Where others have the same, these stay
        what they are: the request's own."""
        node = self._root
        for index, key in enumerate(self._keys(tokens)):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key, held.pages[index])
                child.users, child.used = 1, next(self._clock)
                held.nodes[index] = child
            node = child

    def release(self, held: Held) -> None:
        for node, page in zip(held.nodes, held.pages, strict=True):
            if node is None:
                self._free.append(page)
            else:
                node.users -= 1
        held.nodes, held.pages = [], []

    def _take(self) -> int:
        if not self._free:
            self._evict()
        return self._free.pop()

    def _evict(self) -> None:
        """The page used longest ago that nobody uses and none is behind."""
        leaves = [node for node in self._nodes() if not node.users and not node.children]
        oldest = min(leaves, key=lambda node: node.used)
        assert oldest.parent is not None
        del oldest.parent.children[oldest.key]
        self._free.append(oldest.page)

    def _nodes(self) -> Iterator[Node]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node

    def _keys(self, tokens: Sequence[int]) -> Iterator[Key]:
        for start in range(0, len(tokens) - self.tokens + 1, self.tokens):
            yield tuple(tokens[start : start + self.tokens])
