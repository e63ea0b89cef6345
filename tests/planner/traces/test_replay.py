from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdd_runtime.planner import WorkloadError, read_workload
from pdd_runtime.planner.workload_statistics import describe

TRACES = Path(__file__).parents[4] / "shared" / "traces"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """100 requests, one each 2 s, in pairs that share all but the last of 4 blocks."""
    path = tmp_path / "trace.jsonl"
    lines = []
    for number in range(100):
        first = number // 2 * 10
        ids = [first, first + 1, first + 2, 1000 + number]
        line = {"timestamp": 2000 * number, "input_length": 2000, "output_length": 100, "hash_ids": ids}
        lines.append(json.dumps(line))
    path.write_text("\n".join(lines))
    return path


def test_starts_are_as_recorded_or_stretched_to_the_rate(trace: Path) -> None:
    assert [session.start for session in read_workload(f"trace=mooncake:{trace}").sessions(3, 0)] == [0, 2, 4]
    quick = read_workload(f"trace=mooncake:{trace},rate=5").sessions(1000, 0)
    assert [session.start for session in quick[:3]] == pytest.approx([0, 0.2, 0.4])
    assert len(quick) == 100


def test_a_closed_loop_takes_one_after_another(trace: Path) -> None:
    workload = read_workload(f"trace=mooncake:{trace},concurrency=3")
    assert workload.users == 3
    assert {session.start for session in workload.sessions(100, 0)} == {None}
    assert read_workload(f"trace=mooncake:{trace}").users == 0


def test_a_relative_path_begins_at_the_workloads_file(trace: Path) -> None:
    (trace.parent / "w.yaml").write_text(f"trace: mooncake:{trace.name}\n")
    assert len(read_workload(str(trace.parent / "w.yaml")).sessions(1000, 0)) == 100


def test_it_is_written_as_it_is_read_back(trace: Path) -> None:
    workload = read_workload(f"trace=mooncake:{trace},rate=5")
    written = trace.parent / "w.json"
    written.write_text(json.dumps(workload.model_dump(mode="json")))
    assert read_workload(str(written)).sessions(1000, 0) == workload.sessions(1000, 0)


def test_scaled_prompts_have_the_same_share_in_common(trace: Path) -> None:
    text = f"trace: {{format: mooncake, file: {trace.name}, scale: 0.013, requests: 40}}\n"
    (trace.parent / "w.yaml").write_text(text)
    sessions = read_workload(str(trace.parent / "w.yaml")).sessions(1000, 0)
    assert len(sessions) == 40
    for first, second in zip(sessions[::2], sessions[1::2], strict=True):
        (a,), (b,) = first.turns, second.turns
        assert (a.prompt, a.output, b.prompt) == (26, 1, 26)
        assert b.spans == ((a.spans[0][0], 20), (b.spans[1][0], 6))


def test_long_prompts_answers_and_pauses_are_cut(tmp_path: Path) -> None:
    requests = [{"t": t, "in": n, "out": 9, "hash_ids": [1, 2, 3]} for t, n in ((0, 300), (99, 400))]
    (tmp_path / "a.json").write_text(json.dumps({"requests": requests}))
    cut = "longest_prompt: 100, longest_output: 5, longest_think: 2"
    (tmp_path / "w.yaml").write_text(f"trace: {{format: agent, file: a.json, {cut}}}\n")
    ((first, second),) = [session.turns for session in read_workload(str(tmp_path / "w.yaml")).sessions(10, 0)]
    assert (first.prompt, first.reused, first.output) == (100, 0, 5)
    assert (second.prompt, second.reused, second.think) == (100, 99, 2)


@pytest.mark.parametrize(
    ("spec", "what", "why"),
    [
        ("trace=mooncake", "trace is 'mooncake'", "FORMAT:FILE"),
        ("trace=other:x", "trace is 'other:x'", "mooncake, azure, agent"),
        ("trace=azure:nowhere.csv", "the trace cannot be read", "No such file"),
        ("trace=mooncake:x,prompt=5", "contradicts itself", "the trace says prompt itself"),
        ("trace=mooncake:x,hit=0.5", "contradicts itself", "the trace says hit itself"),
    ],
)
def test_what_does_not_go_together_is_said(spec: str, what: str, why: str) -> None:
    with pytest.raises(WorkloadError) as told:
        read_workload(spec)
    assert what in told.value.what
    assert why in str(told.value)


def test_an_unknown_key_of_a_trace_has_its_place(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text("trace:\n  format: azure\n  file: x.csv\n  scal: 2\n")
    with pytest.raises(WorkloadError) as told:
        read_workload(str(tmp_path / "w.yaml"))
    assert told.value.where == f"{tmp_path / 'w.yaml'}:4:3"
    assert 'did you mean "scale"?' in str(told.value)


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"the public traces are not here: {TRACES}")
@pytest.mark.parametrize(
    ("spec", "requests", "hit", "above", "below", "short"),
    [
        ("mooncake:mooncake_conversation_trace.jsonl.gz", 12_031, 0.374, 0.098, 0.841, 0.793),
        ("mooncake:mooncake_synthetic_trace.jsonl.gz", 3_993, 0.651, 0.373, 0.577, 0.944),
        ("agent:cc_requests.csv.gz", 49_334, 0.962, 0.881, 0.072, 0.793),
    ],
)
def test_public_traces_are_as_others_have_counted_them(
    spec: str, requests: int, hit: float, above: float, below: float, short: float
) -> None:
    format, _, file = spec.partition(":")
    told = describe(read_workload(f"trace={format}:{TRACES / file},concurrency=1"), 1_000_000, 0)
    assert told.requests == requests
    assert told.hit.of_tokens == pytest.approx(hit, abs=0.002)
    assert told.hit.above_95 == pytest.approx(above, abs=0.006)
    assert told.hit.below_90 == pytest.approx(below, abs=0.003)
    assert told.outputs_below[500] == pytest.approx(short, abs=0.002)


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"the public traces are not here: {TRACES}")
def test_raw_sessions_grow_on_themselves() -> None:
    sessions = read_workload(f"trace=agent:{TRACES / 'cc_sample'}").sessions(1000, 0)
    assert len(sessions) == 12
    assert sum(turn.reused for s in sessions for turn in s.turns) / sum(
        turn.prompt for s in sessions for turn in s.turns
    ) == pytest.approx(0.94, abs=0.01)
