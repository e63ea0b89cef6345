"""Who wants to be told of something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec

What = ParamSpec("What")


class Watchers(Generic[What]):
    """Callbacks that are called at once, in the order in which they came. One may leave while it is called."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[What, None]] = []

    def __len__(self) -> int:
        return len(self._callbacks)

    def add(self, callback: Callable[What, None]) -> Callable[[], None]:
        """Call it from now on, until the function returned is called, which is idempotent."""
        self._callbacks.append(callback)

        def remove() -> None:
            if callback in self._callbacks:
                self._callbacks.remove(callback)

        return remove

    def tell(self, *args: What.args, **kwargs: What.kwargs) -> None:
        for callback in tuple(self._callbacks):
            callback(*args, **kwargs)
