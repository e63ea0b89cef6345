"""What one user asks, one request after the other."""

from __future__ import annotations

import msgspec

Spans = tuple[tuple[int, int], ...]
"""Tokens by where they came up first: (chain, how many of its leading tokens). A chain is a run of tokens that first
stood in one request; two requests begin alike as far as their spans do."""


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One request of a session. Lengths are tokens."""

    reused: int
    """Leading prompt tokens that an earlier request had as well: of the session's history, of a prefix that sessions
    share, or, in a trace, of any request before."""
    fresh: int
    """Prompt tokens behind them that no request had before; at least 1."""
    output: int
    think: float
    """Seconds from the end of the turn before to this one; 0 for the first."""
    spans: Spans
    """The prompt. The last one is a chain of this session's own, and the answer goes on in it."""

    @property
    def prompt(self) -> int:
        return self.reused + self.fresh


class Session(msgspec.Struct, frozen=True, gc=False):
    """Its requests go one after the other."""

    number: int
    start: float | None
    """Seconds from the beginning to its first turn; None (closed loop): when one before has ended."""
    prefix: int
    """Which of the shared prefixes its first turn begins with."""
    turns: tuple[Turn, ...]
