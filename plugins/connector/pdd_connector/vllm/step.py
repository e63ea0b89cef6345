"""What the connector in vLLM's scheduler tells those in its workers, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Load:
    """KV that the worker's blocks hold and the pages of a request do not."""

    id: str
    """Of the transfer."""
    start: int
    """The first token to load: the first of a page."""
    end: int
    """One behind the last; it may end inside a page."""


@dataclass(frozen=True)
class Pages:
    """Pages of a request in order of position."""

    start: int
    """Where they stand in its table, in pages; what stood there and behind before is void."""
    numbers: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """Everything by transfer id; requests that are no transfers do not appear."""

    finished: dict[str, int] = field(default_factory=dict)
    """Over since the step before: how many leading tokens' KV its pages hold. They are free for others from this step
    on."""
    pages: dict[str, Pages] = field(default_factory=dict)
    loads: tuple[Load, ...] = ()
    computed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """How many leading tokens' KV is in the pages before the step (the loads count as done), and after it."""
