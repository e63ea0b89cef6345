from __future__ import annotations

from pdd_runtime.experiments.prompts import Prompts
from pdd_runtime.planner import read_workload


def test_prompts_are_the_same_for_the_same_seed_and_as_long_as_planned() -> None:
    workload = read_workload("prompt=uniform(50, 500),hit=0.5,vocabulary=1000-40000")
    sessions = workload.sessions(20, 4)
    texts = [Prompts(workload, 4).prompt(session, 0, ()) for session in sessions]
    assert texts == [Prompts(workload, 4).prompt(session, 0, ()) for session in sessions]
    assert [len(text) for text in texts] == [session.turns[0].prompt for session in sessions]
    assert all(1000 <= token <= 40000 for text in texts for token in text)
    assert texts != [Prompts(workload, 5).prompt(session, 0, ()) for session in sessions]


def test_every_token_of_the_vocabulary_comes_up() -> None:
    workload = read_workload("prompt=2000,vocabulary=7-16")
    (session,) = workload.sessions(1, 0)
    assert set(Prompts(workload, 0).prompt(session, 0, ())) == set(range(7, 17))


def test_first_turns_share_their_prefix_and_nothing_else() -> None:
    workload = read_workload("prompt=400,hit=0.5")
    prompts = Prompts(workload, 0)
    a, b = (prompts.prompt(session, 0, ()) for session in workload.sessions(2, 0))
    assert a[:200] == b[:200] == prompts.prefix(0, 200)
    assert a[200:216] != b[200:216]
    assert prompts.prefix(0, 300)[:200] == prompts.prefix(0, 200)
    assert Prompts(workload, 0, "warm-up").prefix(0, 200) == prompts.prefix(0, 200)


def test_a_later_turn_begins_with_its_history_whatever_became_of_it() -> None:
    workload = read_workload("prompt=100,output=10,turns=2,new=20")
    (session,) = workload.sessions(2, 0)
    prompts = Prompts(workload, 0)
    history = [*prompts.prompt(session, 0, ()), *range(40, 50)]
    later = prompts.prompt(session, 1, history)
    assert later[:110] == history
    assert len(later) == 130
    # The first turn failed: its answer is missing, and the prompt is as long all the same.
    assert len(prompts.prompt(session, 1, history[:100])) == 130
