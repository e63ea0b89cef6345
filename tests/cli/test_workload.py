from __future__ import annotations

import json
from pathlib import Path

from pdd_runtime.cli.console import OK, USAGE
from pdd_runtime.planner import presets
from tests.cli.shell import Cli


def test_it_says_what_a_workload_is_like(cli: Cli) -> None:
    told = cli("workload", "prompt=1000,hit=0.25,output=choice(50:1,200:3),turns=4,rate=2,arrivals=fixed", "-n", "400")
    assert told.code == OK
    lines = {line[:14].strip(): line for line in told.out.splitlines()}
    assert lines["prompt, tokens"].split()[2:] == ["1,000"] * 7
    assert lines["of it known"].split()[3:] == ["25.0%"] * 7
    assert "400 in 100 sessions" in told.out
    assert "gaps vary by 0.00" in told.out


def test_programs_get_the_same_and_a_trace_is_looked_at_whole(cli: Cli, tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 100, "output_length": 9, "hash_ids": [1]}
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps(line | {"timestamp": 500 * n}) for n in range(12_000)))
    told = json.loads(cli("workload", f"trace=mooncake:{tmp_path / 't.jsonl'}", "--format", "json").out)
    assert told["requests"] == told["sessions"] == 12_000
    assert told["rate"] == 2.0
    assert told["hit"]["above_95"] > 0.999
    assert told["outputs_below"] == {"100": 1.0, "500": 1.0, "1000": 1.0}


def test_without_one_it_lists_those_that_come_along(cli: Cli) -> None:
    listed = json.loads(cli("workload", "--format", "json").out)
    assert list(listed) == presets()
    assert all(listed.values())
    assert "report-narrow" in cli("workload").out


def test_what_is_wrong_is_told_with_its_place(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text("prompt: 5\ntrun: 2\n")
    told = cli("workload", str(tmp_path / "w.yaml"))
    assert told.code == USAGE
    assert f"{tmp_path / 'w.yaml'}:2:1" in told.err
    assert "turns" in told.err
