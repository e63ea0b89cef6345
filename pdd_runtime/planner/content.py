"""Which tokens requests have in common, as chains: the simulator's caches and a bench's prompts are made from these."""

from __future__ import annotations

from typing import Final

from pdd_runtime.planner.session import Spans

_TURNS: Final = 1 << 20
"""Chains of a session: more than it can have turns."""


def prefix_chain(prefix: int) -> int:
    """The chain of a prefix that sessions share."""
    return -1 - prefix


def session_chain(session: int, turn: int) -> int:
    """The chain of what a generated session's turn says anew."""
    return session * _TURNS + turn


def leading(spans: Spans, tokens: int) -> Spans:
    """The first `tokens` of them."""
    kept: list[tuple[int, int]] = []
    for chain, length in spans:
        if tokens <= 0:
            break
        kept.append((chain, min(length, tokens)))
        tokens -= length
    return tuple(kept)


def extended(spans: Spans, tokens: int) -> Spans:
    """The last chain goes on by `tokens`."""
    chain, length = spans[-1]
    return (*spans[:-1], (chain, length + tokens))
