"""All ranks of the stand-in live in one process: which one is at work is said by a context variable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_RANK: ContextVar[int] = ContextVar("rank", default=0)


def mpi_rank() -> int:
    return _RANK.get()


@contextmanager
def as_rank(rank: int) -> Iterator[None]:
    token = _RANK.set(rank)
    try:
        yield
    finally:
        _RANK.reset(token)
