"""Names of the blocks that an engine keeps itself, where there is no store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pdd_runtime.kv.layout import KvLayout
from pdd_runtime.kv.names import child
from pdd_runtime.kv.store import Watcher
from pdd_runtime.watchers import Watchers


class CachedNames:
    """What an engine with native KV says that it has cached: the names of full blocks of `layout.block_size` tokens.
    Routing sees them as it sees a store's. All on the event loop."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self._names: dict[bytes, None] = {}
        self._watchers: Watchers[bytes, bool] = Watchers()

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: bytes) -> bool:
        return name in self._names

    def add(self, name: bytes) -> None:
        """Idempotent."""
        if name not in self._names:
            self._names[name] = None
            self._watchers.tell(name, True)

    def remove(self, name: bytes) -> None:
        """Idempotent."""
        if name in self._names:
            del self._names[name]
            self._watchers.tell(name, False)

    def clear(self) -> None:
        """Nothing is cached any more, or nobody knows what is."""
        for name in tuple(self._names):
            self.remove(name)

    def cached(self, root: bytes, tokens: Sequence[int]) -> int:
        """How many leading tokens behind `root` are in full blocks that are here."""
        size, name = self.layout.block_size, root
        for start in range(0, len(tokens), size):
            name = child(name, tokens[start : start + size])
            if start + size > len(tokens) or name not in self._names:
                return start
        return len(tokens)

    def names(self) -> Iterable[bytes]:
        """All, in the order in which they came."""
        return tuple(self._names)

    def watch(self, callback: Watcher) -> Callable[[], None]:
        """Call `callback` whenever a name comes or goes, until the function returned is called."""
        return self._watchers.add(callback)
