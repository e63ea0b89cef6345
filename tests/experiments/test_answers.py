from __future__ import annotations

import pytest

from pdd_runtime.experiments.answers import compare_answers, should_be_equal
from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.graph import Graph
from tests.experiments.graphs import AGGREGATED, PDD, graph


def said(session: int, turn: int, *tokens: int, error: str | None = None) -> Outcome:
    return Outcome(session, turn, 10, 0.0, 0.0, tokens=list(tokens), error=error)


def test_equal_answers_are_equal() -> None:
    ours = [said(0, 0, 1, 2, 3), said(1, 0, 4)]
    found = compare_answers(ours, reversed(ours), True)
    assert (found.compared, found.equal, found.similarity, found.first_difference) == (2, 2, 1.0, None)


def test_answers_that_part_are_as_alike_as_they_are() -> None:
    ours = [said(0, 0, 1, 2, 3, 4), said(1, 0, 1, 2, 3, 4), said(2, 0, 5, 6)]
    theirs = [said(0, 0, 1, 2, 3, 9), said(1, 0, 1, 9, 9, 9), said(2, 0, 5, 6)]
    found = compare_answers(ours, theirs, False)
    assert (found.compared, found.equal) == (3, 1)
    assert found.similarity == pytest.approx((0.75 + 0.25 + 1) / 3)
    assert found.first_difference == 3


def test_one_that_is_the_beginning_of_the_other_differs_at_its_end() -> None:
    assert compare_answers([said(0, 0, 1, 2)], [said(0, 0, 1, 2, 3)], True).first_difference == 2


def test_turns_behind_a_difference_have_other_prompts_and_are_left_out() -> None:
    ours = [said(0, 0, 1), said(0, 1, 2), said(0, 2, 3), said(1, 0, 7), said(1, 1, 8)]
    theirs = [said(0, 0, 1), said(0, 1, 9), said(0, 2, 3), said(1, 0, 7), said(1, 1, 8)]
    found = compare_answers(ours, theirs, True)
    assert (found.compared, found.equal) == (4, 3)


def test_what_failed_is_no_answer() -> None:
    found = compare_answers([said(0, 0, 1), said(1, 0, error="no")], [said(0, 0, error="no"), said(1, 0, 1)], True)
    assert (found.compared, found.equal, found.similarity) == (0, 0, None)


def with_mode(text: str, mode: str) -> Graph:
    return graph(text.replace("{source: toy}", f"{{source: toy, mode: {mode}}}"))


def test_answers_should_be_equal_where_model_and_engines_are() -> None:
    aggregated, pdd = graph(AGGREGATED), graph(PDD)
    other_engine = graph(AGGREGATED.replace("plugin: scripted", "plugin: other"))
    other_model = graph(AGGREGATED.replace("source: toy", "source: another"))
    assert should_be_equal(aggregated, pdd)
    assert not should_be_equal(aggregated, other_engine)
    assert not should_be_equal(aggregated, other_model)
    assert not should_be_equal(None, pdd)
    exact = with_mode(AGGREGATED, "exact")
    assert should_be_equal(exact, with_mode(AGGREGATED.replace("plugin: scripted", "plugin: other"), "exact"))
    assert not should_be_equal(exact, other_engine)
