from __future__ import annotations

import io

import pytest
from rich.console import Console

from pdd_runtime.cli.bench import tables
from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.experiments.report import Measured, report
from pdd_runtime.planner import read_workload


def outcome(number: int, slow: float) -> Outcome:
    stamps = [slow * (1 + 0.1 * n + 0.01 * number * n) for n in range(12)]
    return Outcome(
        session=number, turn=0, prompt=10, due=0.0, sent=0.0, stamps=stamps, tokens=[1] * 12, ended=stamps[-1]
    )


def printed(graphs: list[str], width: int) -> str:
    measured = [
        Measured(name, None, [outcome(number, float(slow)) for number in range(4)])
        for slow, name in enumerate(graphs, 1)
    ]
    file = io.StringIO()
    Console(file=file, width=width).print(tables(report(read_workload("prompt=10"), 4, 0, measured)))
    return file.getvalue()


def heads(text: str) -> list[list[str]]:
    """Of the tables of times, which have a column of ratios: the graphs' names."""
    return [line.replace("/ torch", "").split() for line in text.splitlines() if "/ torch" in line]


@pytest.mark.parametrize("width", [110, 300])
def test_no_cell_is_broken_whatever_the_width_and_the_number_of_graphs(width: int) -> None:
    lines = printed(["torch", "llamacpp", "vllm", "sglang"], width).splitlines()
    rows = [line for line in lines if " mean " in line]
    assert rows
    assert all(row.count("(") == row.count(")") > 0 for row in rows)


def test_graphs_stand_beside_each_other_or_each_beside_the_first() -> None:
    graphs = ["torch", "llamacpp", "vllm"]
    assert heads(printed(graphs, 300)) == [graphs]
    assert heads(printed(graphs, 110)) == [["torch", "llamacpp"], ["torch", "vllm"]]
    assert heads(printed(graphs[:2], 110)) == [["torch", "llamacpp"]]
