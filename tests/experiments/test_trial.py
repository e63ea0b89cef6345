from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.experiments.paired import Question
from pdd_runtime.experiments.trial import LOOKS, Rules, Trial, Verdict, Word, verdict_of

QUESTIONS = tuple(map(Question.parse, ("ttft.typical", "ttft.p90", "tpot.typical", "tpot.p90", "e2e.typical")))
TOKENS = 12

Factor = Callable[[np.random.Generator], float]


def outcome(session: int, ttft: float, steps: np.ndarray) -> Outcome:
    stamps = [ttft, *(ttft + np.cumsum(steps))]
    return Outcome(session, 0, 100, 0.0, 0.0, [float(at) for at in stamps], [1] * len(stamps), float(stamps[-1]))


def tried(seed: int, slowdown: float = 1.0, requests: int = 100, rules: Rules | None = None) -> Trial:
    """A and B answer the same requests, which differ a lot among themselves; a busy machine delays now one, now the
    other, and both drift."""
    rng = np.random.default_rng(seed)
    trial = Trial(("A", "B"), rules or Rules(QUESTIONS), requests)
    for session in range(requests):
        length, drift = rng.lognormal(0, 0.5), 1 + 0.3 * np.sin(session / 9)
        found = {}
        for name, factor in (("A", 1.0), ("B", slowdown)):
            busy = 1 + rng.exponential(0.5) if rng.random() < 0.05 else 1.0
            slow = factor * drift * busy * rng.lognormal(0, 0.03)
            steps = 0.02 * slow * rng.lognormal(0, 0.08, TOKENS - 1)
            found[name] = [outcome(session, 0.5 * length * slow * rng.lognormal(0, 0.05), steps)]
        trial.add(session, found)
        if trial.due and trial.look():
            break
    trial.look()
    return trial


def words(trial: Trial) -> set[Word]:
    return {verdict.word for verdict in trial.verdicts["B"].values()}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_of_a_hundred_tests_of_a_graph_against_itself_95_say_no_difference() -> None:
    wrong = [seed for seed in range(100) if words(tried(seed)) & {Word.better, Word.worse}]
    assert len(wrong) <= 5, wrong


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_a_minimum_effect_the_error_is_still_what_was_promised() -> None:
    rules = Rules(QUESTIONS[:2], minimum_effect=0.0, error=0.1)
    wrong = sum(bool(words(tried(seed, rules=rules)) & {Word.better, Word.worse}) for seed in range(100))
    # At most 10 are to be expected; 20 come by chance once in five hundred times.
    assert wrong < 20


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("slowdown", [1.1, 1 / 1.1])
def test_a_tenth_is_found_and_found_early(slowdown: float) -> None:
    expected = Word.worse if slowdown > 1 else Word.better
    trials = [tried(seed, slowdown) for seed in range(10)]
    found = [trial.verdicts["B"][Question("tpot", "typical")] for trial in trials]
    assert [verdict.word for verdict in found] == [expected] * 10
    assert {verdict_of(trial.verdicts["B"].values()) for trial in trials} == {expected}
    assert sum(verdict.decided_at or 0 for verdict in found) < 60 * 10


def test_a_test_ends_when_every_question_has_its_verdict() -> None:
    rules = Rules((Question("tpot", "typical"),))
    trial = tried(1, 1.5, rules=rules)
    assert trial.decided
    assert trial.asked < 50
    assert trial.looks[-1] == trial.asked
    on = tried(1, 1.5, rules=Rules((Question("tpot", "typical"),), early=False))
    assert on.asked == 100
    assert len(on.looks) == LOOKS
    assert on.verdicts["B"][rules.questions[0]].decided_at == trial.asked


def test_graphs_that_are_alike_are_said_to_be_so() -> None:
    rng = np.random.default_rng(0)
    question = Question("tpot", "mean")
    trial = Trial(("A", "B"), Rules((question,)), 80)
    for session in range(80):
        trial.add(
            session,
            {name: [outcome(session, 1.0, 0.02 * rng.lognormal(0, 0.02, TOKENS - 1))] for name in ("A", "B")},
        )
        if trial.due and trial.look():
            break
    assert trial.verdicts["B"][question].word is Word.same
    assert trial.asked < 80


def test_a_tail_needs_its_requests() -> None:
    trial = tried(3, 3.0, requests=40)
    assert trial.verdicts["B"][Question("ttft", "typical")].word is Word.worse
    assert trial.verdicts["B"][Question("ttft", "p90")].word is Word.open


def test_what_one_look_has_shown_stands() -> None:
    """The error is spent over all looks, so a later and noisier one takes nothing back."""
    rng = np.random.default_rng(0)
    question = Question("ttft", "mean")
    trial = Trial(("A", "B"), Rules((question,), early=False), 80)
    for session in range(80):
        factor = 2.0 if session < 20 else float(rng.lognormal(0, 3))
        trial.add(
            session, {name: [outcome(session, 1.0 if name == "A" else factor, np.full(3, 0.1))] for name in ("A", "B")}
        )
        if trial.due:
            trial.look()
    trial.look()
    verdict = trial.verdicts["B"][question]
    assert (verdict.word, verdict.decided_at) == (Word.worse, 16)
    # The interval that showed it is still the narrowest.
    assert verdict.ratio_interval[0] > 1.9
    assert verdict.effect is not None
    assert verdict.effect.requests == 80


def test_more_questions_and_graphs_make_each_harder_to_answer() -> None:
    one, many = (
        tried(5, rules=Rules(questions)).verdicts["B"][Question("ttft", "typical")].critical
        for questions in (QUESTIONS[:1], QUESTIONS)
    )
    assert many > one


def test_failed_requests_are_left_out_on_both_sides() -> None:
    trial = Trial(("A", "B"), Rules((Question("ttft", "mean"),)), 20)
    for session in range(20):
        found = {name: [outcome(session, 1.0 + session, np.full(3, 0.1))] for name in ("A", "B")}
        if session % 2:
            found["B"][0].error = "it broke"
        trial.add(session, found)
    trial.look()
    effect = trial.verdicts["B"][Question("ttft", "mean")].effect
    assert effect is not None
    assert (effect.requests, effect.ratio) == (10, pytest.approx(1))


@pytest.mark.parametrize(
    ("words", "whole"),
    [
        ((Word.better, Word.open), Word.better),
        ((Word.worse, Word.same), Word.worse),
        ((Word.better, Word.worse), None),
        ((Word.same, Word.same), Word.same),
        ((Word.same, Word.open), Word.open),
        ((), Word.open),
    ],
)
def test_a_graph_is_better_where_it_is_worse_in_nothing(words: tuple[Word, ...], whole: Word | None) -> None:
    assert verdict_of(Verdict(word, None, 2.0, None, (0.0, 9.0), (0.0, 9.0)) for word in words) is whole
