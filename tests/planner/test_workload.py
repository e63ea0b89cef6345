from __future__ import annotations

import json
import re
import statistics
import tracemalloc
from collections import deque
from itertools import islice, pairwise
from pathlib import Path

import pytest

from pdd_runtime.planner import Distribution, WorkloadError, presets, read_workload
from pdd_runtime.planner.content import extended, leading
from pdd_runtime.planner.workload_statistics import describe

SHORT = "prompt=uniform(500, 1500),output=100,rate=0.5,hit=0.5,turns=3,think=2"
FILE = """\
prompt: uniform(500, 1500)
output: 100
rate: 0.5
hit: 0.5
turns: 3
think: 2
"""


def test_a_short_text_a_file_and_json_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(FILE)
    workload = read_workload(SHORT)
    assert read_workload(str(tmp_path / "w.yaml")) == workload
    (tmp_path / "w.json").write_text(json.dumps(workload.model_dump(mode="json")))
    assert read_workload(str(tmp_path / "w.json")) == workload


def test_the_same_seed_gives_the_same_requests_and_another_one_others() -> None:
    workload = read_workload(SHORT)
    assert workload.sessions(50, 1) == workload.sessions(50, 1)
    assert workload.sessions(50, 1) != workload.sessions(50, 2)
    assert workload.sessions(50, 1) != workload.sessions(50, 1, "warm-up")


def test_more_requests_begin_with_the_same_ones() -> None:
    workload = read_workload("prompt=uniform(10,900),output=5,turns=2")
    assert workload.sessions(60, 1)[:10] == workload.sessions(20, 1)


@pytest.mark.parametrize("requests", [1, 2, 3, 4, 50])
def test_there_are_as_many_requests_as_asked_for(requests: int) -> None:
    sessions = read_workload(SHORT).sessions(requests, 0)
    assert sum(len(session.turns) for session in sessions) == requests


def test_the_share_of_reused_tokens_is_what_was_asked_for() -> None:
    workload = read_workload("prompt=1000,output=100,hit=beta(9,1),turns=4")
    turns = [turn for session in workload.sessions(2000, 3) for turn in session.turns]
    assert all(turn.prompt == 1000 and turn.fresh >= 1 for turn in turns)
    assert sum(turn.reused for turn in turns) / 2_000_000 == pytest.approx(0.9, abs=0.02)


def test_no_turn_reuses_more_than_its_history_has() -> None:
    workload = read_workload("prompt=choice(10:1,1000:1),output=5,hit=0.9,turns=6")
    for session in workload.sessions(600, 3):
        for before, turn in pairwise(session.turns):
            assert turn.reused <= before.prompt + before.output


def test_two_prompts_begin_alike_as_far_as_their_chains_do() -> None:
    workload = read_workload("prompt=1000,output=50,hit=uniform(0,1),turns=4,prefixes=3")
    for session in workload.sessions(200, 1):
        for turn in session.turns:
            assert sum(length for _, length in turn.spans) == turn.prompt
        for before, turn in pairwise(session.turns):
            history = extended(before.spans, before.output)
            assert leading(turn.spans, turn.reused) == leading(history, turn.reused)
    chains = [{chain for turn in session.turns for chain, _ in turn.spans} for session in workload.sessions(200, 1)]
    assert {chain for a, b in pairwise(chains) for chain in a & b} <= {-1, -2, -3}


def test_a_conversation_grows_by_its_answers_and_its_new_tokens() -> None:
    (session,) = read_workload("prompt=100,output=10,turns=3,new=20").sessions(3, 0)
    assert [(turn.reused, turn.fresh) for turn in session.turns] == [(0, 100), (110, 20), (140, 20)]


def test_another_distribution_of_answers_leaves_prompts_and_arrivals_as_they_were() -> None:
    short, long = (
        read_workload(f"prompt=uniform(9,99),hit=beta(2,1),rate=2,output={x}") for x in ("5", "uniform(5,9)")
    )
    for a, b in zip(short.sessions(50, 1), long.sessions(50, 1), strict=True):
        assert (a.start, a.turns[0].spans) == (b.start, b.turns[0].spans)


def test_a_stream_goes_on_for_ever_and_is_made_as_it_is_taken() -> None:
    workload = read_workload("prompt=100,turns=choice(1:1,7:1),rate=10")
    stream = workload.stream(1)
    taken = [next(stream) for _ in range(3000)]
    assert taken[:100] == list(islice(workload.stream(1), 100))
    assert tuple(taken[:20]) == workload.sessions(sum(len(session.turns) for session in taken[:20]), 1)


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    stream = read_workload("prompt=uniform(10,900),turns=3,new=5,rate=10").stream(1)
    deque(islice(stream, 2000), 0)
    tracemalloc.start()
    try:
        deque(islice(stream, 20_000), 0)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_arrivals_are_poisson_at_the_rate_of_requests() -> None:
    workload = read_workload("rate=20,turns=4,think=1")
    starts = [session.start for session in workload.sessions(8000, 5)]
    gaps = [b - a for a, b in pairwise(starts) if a is not None and b is not None]
    assert starts == sorted(starts, key=lambda at: at or 0.0)
    assert statistics.mean(gaps) == pytest.approx(4 / 20, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1)


def test_closed_loop_sessions_have_no_time_and_first_turns_no_think() -> None:
    sessions = read_workload("concurrency=3,turns=2,think=5").sessions(8, 0)
    assert {session.start for session in sessions} == {None}
    assert [turn.think for turn in sessions[0].turns] == [0.0, 5.0]


@pytest.mark.parametrize(
    ("spec", "what", "more"),
    [
        ("promt=1000", 'unknown key "promt"', 'did you mean "prompt"?'),
        ("prompt=-1", "prompt is '-1'", "must not be below 1"),
        ("prompt=choice(uniform(0,5):1,exponential(9):1)", "prompt is", "must not be below 1"),
        ("prompt=many", "prompt is 'many'", "'many' is not a number"),
        ("hit=90", "hit is '90'", "between 0 and 1"),
        ("hit=lognormal(1,1)", "hit is", "between 0 and 1"),
        ("rate=0", "rate is '0'", "greater than 0"),
        ("rate=1,concurrency=2", "contradicts itself", "rate (open loop) and concurrency"),
        ("prompt=1,prompt=2", '"prompt" stands twice', "keep one"),
        ("prompt=", '"prompt=" is no KEY=VALUE', "prompt=1000"),
        ("prompt=5,output", '"output" is no KEY=VALUE', "prompt=1000"),
        ("rate=1,arrivals=often", "arrivals is 'often'", "one of poisson, fixed"),
        ("vocabulary=9-2", "vocabulary is '9-2'", "FIRST-LAST"),
        ("turns=2.5,prefixes=0", "prefixes is '0'", "greater than or equal to 1"),
        ("nowhere.yaml", "the workload cannot be read", "No such file"),
    ],
)
def test_what_is_wrong_with_a_short_text_is_said(spec: str, what: str, more: str) -> None:
    with pytest.raises(WorkloadError) as told:
        read_workload(spec)
    assert what in told.value.what
    assert more in str(told.value)


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("prompt: 1000\noutpt: 5\n", ":2:1", 'unknown key "outpt"'),
        ("prompt: 1000\nhit:  2\n", ":2:7", "hit is 2"),
        ("- 5\n", ":1:1", "the workload is a list"),
        ("prompt: [\n", ":2:1", "not valid YAML"),
        ("", "", "the workload is empty"),
    ],
)
def test_what_is_wrong_in_a_file_has_its_place(tmp_path: Path, text: str, place: str, what: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(text)
    with pytest.raises(WorkloadError) as told:
        read_workload(str(path))
    assert told.value.where == f"{path}{place}"
    assert what in told.value.what


@pytest.mark.parametrize("name", presets())
def test_what_comes_along_is_found_by_its_name_and_can_be_used(name: str) -> None:
    assert len(read_workload(name).sessions(100, 0)) > 0
    assert f"| `{name}` |" in MANUAL.read_text()


def test_a_file_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report").write_text("prompt: 7\n")
    assert read_workload("report").prompt == Distribution.fixed(7)


def test_the_reports_workload_has_its_statistics() -> None:
    """facts of arXiv 2609.13161: hits of 2 to 99 %, 90 % on average, 70 to 80 % above 95 %; answers of 1,000 tokens on
    average, 30 % below 100, 41.7 % from there to 500."""
    told = describe(read_workload("report"), 200_000, 0)
    assert told.prompt.least == told.prompt.most == 64_000
    assert told.hit.of_tokens == pytest.approx(0.9, abs=0.005)
    assert 0.7 <= told.hit.above_95 <= 0.8
    assert 0.02 <= told.hit.share.least <= told.hit.share.most <= 0.99
    assert told.output.mean == pytest.approx(1000, rel=0.03)
    assert told.outputs_below[100] == pytest.approx(0.3, abs=0.01)
    assert told.outputs_below[500] - told.outputs_below[100] == pytest.approx(0.417, abs=0.01)
    assert told.rate == pytest.approx(11.5, rel=0.02)


MANUAL = Path(__file__).parents[2] / "docs" / "workloads.md"


def test_the_manuals_example_is_right(tmp_path: Path) -> None:
    example = re.findall(r"```yaml\n(.*?)```", MANUAL.read_text(), re.DOTALL)[0]
    (tmp_path / "agents.yaml").write_text(example)
    assert str(read_workload(str(tmp_path / "agents.yaml")).hit) == "beta(9, 1)"
