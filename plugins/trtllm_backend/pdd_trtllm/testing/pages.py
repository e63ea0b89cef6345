"""Pages of KV in the stand-in's cache: whose they are, and which of them later requests find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

from pdd_trtllm.testing.events import Events

Key = tuple[int, ...]


class Node:
    """A page of a known prefix: full, or the end of one."""

    def __init__(self, parent: Node | None, key: Key, page: int, number: int = 0) -> None:
        self.parent, self.key, self.page = parent, key, page
        self.number = number
        """In events."""
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
    """Hands out pages, keeps them for reuse, and takes back what nobody uses."""

    def __init__(
        self, pages: int, tokens: int, *, copy: Callable[[int, int], None] | None = None, events: Events | None = None
    ) -> None:
        """`copy`: of one page to another; with it, parts of pages are found as well."""
        self.count, self.tokens = pages, tokens
        self._copy, self._events = copy, events
        self._free = list(range(pages))
        self._root = Node(None, (), -1)
        self._clock = count(1)
        self._numbers = count(1)

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
        found += self._begin_partly(held, node, tokens[found:-1])
        self.grow(held, len(tokens))
        return held, found

    def grow(self, held: Held, tokens: int) -> None:
        """Room for `tokens` tokens."""
        while len(held.pages) * self.tokens < tokens:
            held.pages.append(self._take())
            held.nodes.append(None)

    def keep(self, held: Held, tokens: Sequence[int], *, tail: bool = False) -> None:
        """Pages of `tokens`, all of them computed, are found from now on: full ones, and with `tail` the last as it is,
        which nobody writes to any more. Where others have the same, these stay what they are: the request's own."""
        node, parent, new = self._root, self._root, list[Node]()
        for index, key in enumerate(self._keys(tokens, tail=tail and self._copy is not None)):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(node, key, held.pages[index], next(self._numbers))
                child.users, child.used = 1, next(self._clock)
                held.nodes[index] = child
                if not new:
                    parent = node
                new.append(child)
            node = child
        if new and self._events is not None:
            self._events.stored(parent.number or None, [(one.number, one.key) for one in new])

    def release(self, held: Held) -> None:
        for node, page in zip(held.nodes, held.pages, strict=True):
            if node is None:
                self._free.append(page)
            else:
                node.users -= 1
        held.nodes, held.pages = [], []

    def _begin_partly(self, held: Held, node: Node, tokens: Sequence[int]) -> int:
        """A copy of the page behind `node` that begins with most of `tokens`; how many these are."""
        best, most = None, 0
        for key, child in node.children.items() if self._copy is not None else ():
            alike = next((i for i, pair in enumerate(zip(key, tokens, strict=False)) if pair[0] != pair[1]), None)
            alike = min(len(key), len(tokens)) if alike is None else alike
            if alike > most:
                best, most = child, alike
        if best is None or self._copy is None or not self._spare(best):
            return 0
        best.users += 1  # It must not be given away to make room for its copy.
        page = self._take()
        best.users -= 1
        best.used = next(self._clock)
        self._copy(best.page, page)
        held.pages.append(page)
        held.nodes.append(None)
        return most

    def _spare(self, node: Node) -> bool:
        """Whether a page can be had that is not its own."""
        return bool(self._free) or any(
            other is not node and not other.users and not other.children for other in self._nodes()
        )

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
        if self._events is not None:
            self._events.removed([oldest.number])

    def _nodes(self) -> Iterator[Node]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            waiting += node.children.values()
            yield node

    def _keys(self, tokens: Sequence[int], *, tail: bool = False) -> Iterator[Key]:
        for start in range(0, len(tokens) if tail else len(tokens) - self.tokens + 1, self.tokens):
            yield tuple(tokens[start : start + self.tokens])
