"""Whether a piece of code does I/O, for the suites of contracts that forbid it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_KINDS = ("open", "os.", "socket.", "subprocess.", "shutil.", "sqlite3.", "time.sleep", "urllib.")
"""Of Python's audit events (docs.python.org/3/library/audit_events.html), those that reach outside."""
_seen: ContextVar[list[str] | None] = ContextVar("seen", default=None)
_hooked: list[bool] = []


@contextmanager
def watched() -> Iterator[list[str]]:
    """The audit events of I/O inside the block, as text. What is imported there for the first time counts as well."""
    if not _hooked:
        # An audit hook stays for good: one is enough, and it does nothing outside such a block.
        sys.addaudithook(_hook)
        _hooked.append(True)
    seen: list[str] = []
    token = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(token)


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    seen = _seen.get()
    if seen is not None and event.startswith(_KINDS):
        seen.append(f"{event}{arguments!r}"[:200])
