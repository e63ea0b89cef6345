"""What a server says of its pages, told in the names of our blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from pdd_runtime.kv import CachedNames
from pdd_runtime.kv.names import child


class _Page(NamedTuple):
    """Where a chain of blocks stands behind a page."""

    parent: bytes
    """The name of the last whole block, or the root."""
    rest: tuple[int, ...]
    """Tokens behind it: fewer than a block has."""
    name: bytes | None
    """Of the block that this page makes whole; None: of none."""


class CachedPages:
    """Keeps `names` by a server's own words: a page has a key, which the server chose, and the key of the page before
    it. A page is a block, or a part of one that divides it. What stands behind a page that is not known is left out:
    routing then knows less than is there, never more."""

    def __init__(self, names: CachedNames, root: Callable[[str], bytes]) -> None:
        """`root`: a tenant's salt → the root of the names of its blocks."""
        self._names, self._root = names, root
        self._size = names.layout.block_size
        self._pages: dict[Hashable, _Page] = {}

    def stored(
        self, keys: Sequence[Hashable], parent: Hashable | None, tokens: Sequence[int], size: int, salt: str = ""
    ) -> None:
        """Pages of `size` tokens each, one behind the other. `parent`: the page before them; None: there is none, and
        then they are of the tenant with `salt`. Raises `ValueError` where keys, tokens and size do not fit."""
        if size < 1 or len(tokens) != len(keys) * size:
            raise ValueError(f"{len(tokens)} tokens in {len(keys)} pages of {size}")
        if self._size % size:
            return  # neither a block nor a part of one
        if parent is None:
            before = _Page(self._root(salt), (), None)
        elif (known := self._pages.get(parent)) is not None:
            before = known
        else:
            return
        for index, key in enumerate(keys):
            before = self._behind(before, tuple(tokens[index * size : (index + 1) * size]))
            self._pages[key] = before
            if before.name is not None:
                self._names.add(before.name)

    def removed(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            page = self._pages.pop(key, None)
            if page is not None and page.name is not None:
                self._names.remove(page.name)

    def clear(self) -> None:
        """Nothing is cached any more, or nobody knows what is."""
        self._pages.clear()
        self._names.clear()

    def _behind(self, before: _Page, tokens: tuple[int, ...]) -> _Page:
        block = before.rest + tokens
        if len(block) < self._size:
            return _Page(before.parent, block, None)
        name = child(before.parent, block)
        return _Page(name, (), name)
