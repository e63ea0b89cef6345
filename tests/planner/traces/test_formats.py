from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from pdd_runtime.planner import Session, WorkloadError, read_workload
from pdd_runtime.planner.traces.agent_table import COLUMNS
from pdd_runtime.planner.traces.lines import LONGEST

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.9799600,110,0
"""


def mooncake(*requests: tuple[float, int, int, list[int]]) -> str:
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    return "".join(json.dumps(dict(zip(keys, request, strict=True))) + "\n" for request in requests)


def sessions(spec: str, requests: int = 10_000) -> tuple[Session, ...]:
    return read_workload(spec).sessions(requests, 0)


def lengths(sessions: Iterable[Session]) -> list[list[tuple[int, int, int]]]:
    return [[(turn.reused, turn.fresh, turn.output) for turn in session.turns] for session in sessions]


def later(one: Session, other: Session) -> float:
    assert one.start is not None
    assert other.start is not None
    return other.start - one.start


def test_mooncakes_requests_have_their_times_and_what_they_have_in_common(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl.gz"
    text = mooncake((0, 1100, 50, [0, 1, 2]), (3000, 1536, 9, [0, 1, 3]), (4500, 1100, 0, [0, 1, 2]))
    trace.write_bytes(gzip.compress(text.encode()))
    found = sessions(f"trace=mooncake:{trace}")
    assert [session.start for session in found] == [0.0, 3.0, 4.5]
    assert lengths(found) == [[(0, 1100, 50)], [(1024, 512, 9)], [(1099, 1, 1)]]
    assert found[1].turns[0].spans == ((0, 1024), (1, 512))


def test_azures_requests_have_in_common_what_the_workload_says(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(AZURE)
    found = sessions(f"trace=azure:{trace},hit=0.5,prefixes=3")
    assert [session.start for session in found] == [0.0, 0.052, 2.0]
    assert lengths(found) == [[(2404, 2404, 10)], [(1590, 1590, 8)], [(55, 55, 1)]]
    assert {session.turns[0].spans[0][0] for session in found} <= {-1, -2, -3}


def agent_session(*requests: object, **more: object) -> str:
    return json.dumps({"id": "x", "block_size": 64, "hash_id_scope": "local", "requests": requests, **more})


def request(t: float, prompt: int, ids: list[int], **more: object) -> dict[str, object]:
    return {"t": t, "type": "s", "in": prompt, "out": 20, "hash_ids": ids, **more}


def test_an_agents_session_has_its_pauses_and_grows_on_itself(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(agent_session(request(0, 70, [1]), request(9, 90, [1], api_time=2.0)))
    first = request(5, 130, [1, 2], api_time=4.0)
    (tmp_path / "a.json").write_text(
        agent_session(first, request(15, 200, [1, 2, 3]), request(30, 201, [1, 4], think_time=2.5))
    )
    (tmp_path / "notes.txt").write_text("not a session")
    one, two = sessions(f"trace=agent:{tmp_path},concurrency=2")
    assert lengths([one]) == [[(0, 130, 20), (128, 72, 20), (64, 137, 20)]]
    assert [turn.think for turn in one.turns] == [0.0, 6.0, 2.5]
    # Ids of a session are its own.
    assert lengths([two]) == [[(0, 70, 20), (64, 26, 20)]]
    assert not {chain for turn in one.turns for chain, _ in turn.spans} & {chain for chain, _ in two.turns[1].spans}
    assert one.start is two.start is None


def test_ids_that_are_global_are_everybodys(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.json").write_text(agent_session(request(0, 70, [1]), hash_id_scope="global"))
    assert lengths(sessions(f"trace=agent:{tmp_path}")) == [[(0, 70, 20)], [(64, 6, 20)]]


@pytest.mark.parametrize("clock", [0.0, 7.0])
def test_an_agent_that_an_agent_begins_is_a_session_of_its_own_so_long_after(tmp_path: Path, clock: float) -> None:
    inner = [request(clock, 64, [1]), request(clock + 3, 100, [1])]
    outer = [request(0, 130, [1, 2]), {"t": 7, "type": "subagent", "requests": inner}, request(20, 140, [1, 2])]
    (tmp_path / "a.json").write_text(agent_session(*outer))
    main, sub = sessions(f"trace=agent:{tmp_path},rate=1")
    assert later(main, sub) == pytest.approx(7)
    assert [[turn.prompt for turn in session.turns] for session in (main, sub)] == [[130, 140], [64, 100]]


def test_a_table_of_sessions_is_taken_apart_by_its_clocks_and_by_what_was_known(tmp_path: Path) -> None:
    rows = [
        ("x", 0.0, 0, 130, 50, 0),
        ("x", 10.0, 0, 200, 5, 128),
        ("x", 12.0, 1, 70, 5, 0),
        ("x", 13.0, 1, 80, 5, 64),
        ("x", 30.0, 0, 210, 5, 192),
        ("x", 0.0, 0, 128, 9, 0),
    ]
    text = [COLUMNS, *rows]
    (tmp_path / "t.csv").write_text("\n".join(",".join(str(cell) for cell in row) for row in text))
    found = sessions(f"trace=agent:{tmp_path / 't.csv'},rate=0.001")
    main, sub, other = sorted(found, key=lambda session: session.turns[0].spans[0][0])
    assert lengths([main]) == [[(0, 130, 50), (128, 72, 5), (192, 18, 5)]]
    assert lengths([sub, other]) == [[(0, 70, 5), (64, 16, 5)], [(0, 128, 9)]]
    assert [turn.think for turn in main.turns] == pytest.approx([0.0, 9.0, 19.9])
    assert later(main, sub) == pytest.approx(12)


def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl.gz"
    trace.write_bytes(gzip.compress(b" " * (LONGEST + 1), 1))
    with pytest.raises(WorkloadError, match="too long"):
        sessions(f"trace=mooncake:{trace}")


@pytest.mark.parametrize(
    ("format", "name", "text", "place", "why"),
    [
        ("mooncake", "x.jsonl", mooncake((0, 5, 5, [])) + "{}\n", ":2", "timestamp"),
        ("mooncake", "x.jsonl", "nonsense\n", ":1", "malformed"),
        ("mooncake", "x.jsonl", mooncake((0, -5, 5, [])), ":1", "input_length"),
        ("azure", "x.csv", "TIME,ContextTokens\n", ":1", "no column TIMESTAMP, GeneratedTokens"),
        ("azure", "x.csv", AZURE + "soon,1,1\n", ":5", "Invalid isoformat"),
        ("azure", "x.csv", AZURE + "2023-11-16 18:17:05\n", ":5", "1 cells"),
        ("agent", "x.json", '{"requests": [{"t": -1}]}', "", "$.requests[0].t"),
        ("agent", "x.json", '{"requests": []}', "", "no requests"),
        ("agent", "x.csv", ",".join(COLUMNS) + "\nx,0,0,5,5,-1\n", ":2", "below 0"),
        ("mooncake", "x.jsonl.gz", "not gzipped", "", "gzip"),
        ("mooncake", "x.jsonl", "\n", "", ""),
    ],
)
def test_what_is_wrong_in_a_trace_is_told_with_its_line(
    tmp_path: Path, format: str, name: str, text: str, place: str, why: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(WorkloadError) as told:
        sessions(f"trace={format}:{tmp_path / name},concurrency=1")
    assert told.value.where == f"{tmp_path / name}{place}"
    assert why in str(told.value)
