from __future__ import annotations

import json
from pathlib import Path

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


def test_what_recorded_prompts_had_in_common_they_have_again(tmp_path: Path) -> None:
    blocks = [[1, 2, 3], [1, 2, 4], [1, 5], [1, 2, 4, 6]]
    lines = [
        json.dumps({"timestamp": 0, "input_length": 512 * len(ids), "output_length": 5, "hash_ids": ids})
        for ids in blocks
    ]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    workload = read_workload(f"trace=mooncake:{tmp_path / 't.jsonl'}")
    texts = [Prompts(workload, 0).prompt(session, 0, ()) for session in workload.sessions(10, 0)]
    assert [len(text) for text in texts] == [512 * len(ids) for ids in blocks]
    alike = {(a, b): _alike(texts[a], texts[b]) for a in range(4) for b in range(a)}
    expected = {(1, 0): 2, (2, 0): 1, (2, 1): 1, (3, 0): 2, (3, 1): 3, (3, 2): 1}
    assert {pair: tokens // 512 for pair, tokens in alike.items()} == expected
    assert all(tokens % 512 < 20 for tokens in alike.values())


def _alike(one: list[int], other: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
