"""Whether two graphs answer alike. What is quicker because it answers something else is no better."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher

from pydantic import BaseModel, ConfigDict

from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.graph import Graph

_LONGEST = 2000
"""Tokens of an answer that are compared: longer ones take seconds each."""


class Answers(BaseModel):
    """Answers to the same prompts, compared token by token."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    compared: int
    """Requests. Later turns whose prompts differ, because an answer before them did, are left out."""
    equal: int
    similarity: float | None
    """Mean share of tokens that are the same in the same order, 0 to 1; None: nothing was compared."""
    first_difference: int | None
    """Of the answers that differ, the middle position at which they begin to."""
    expected: bool
    """Whether they should be equal: the same model, computed by the same engines or exactly."""


def compare_answers(base: Iterable[Outcome], other: Iterable[Outcome], expected: bool) -> Answers:
    """Of the requests that both answered."""
    theirs = {outcome.key: outcome for outcome in other if outcome.error is None}
    ours = sorted((outcome for outcome in base if outcome.error is None), key=lambda outcome: outcome.key)
    similarities: list[float] = []
    positions: list[int] = []
    # A session's next turn has the same prompt as long as all answers before it were the same.
    turns: dict[int, int] = {}
    for outcome in ours:
        session, turn = outcome.key
        if outcome.key not in theirs or turns.get(session, 0) != turn:
            continue
        a, b = outcome.tokens, theirs[outcome.key].tokens
        if a == b:
            turns[session] = turn + 1
            similarities.append(1.0)
        else:
            positions.append(_first_difference(a, b))
            similarities.append(SequenceMatcher(None, a[:_LONGEST], b[:_LONGEST], autojunk=False).ratio())
    return Answers(
        compared=len(similarities),
        equal=len(similarities) - len(positions),
        similarity=sum(similarities) / len(similarities) if similarities else None,
        first_difference=sorted(positions)[len(positions) // 2] if positions else None,
        expected=expected,
    )


def should_be_equal(base: Graph | None, other: Graph | None) -> bool:
    """Whether greedy answers of both are the same tokens: the same model in the same numbers, and either exact mode or
    the same engines. Of a graph that only its URL is known of, nothing is expected."""
    if base is None or other is None:
        return False
    pools = [(pool.model or graph.spec.model, pool) for graph in (base, other) for pool in graph.spec.pools.values()]
    models = {(model.source, model.dtype) for model, _ in pools}
    engines = {pool.engine.plugin for _, pool in pools}
    return len(models) == 1 and (len(engines) == 1 or all(model.mode == "exact" for model, _ in pools))


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = enumerate(zip(a, b, strict=False))
    return next((position for position, (one, two) in pairs if one != two), min(len(a), len(b)))
