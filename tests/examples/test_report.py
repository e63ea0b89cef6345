"""The report's tables, at small sizes."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pdd_runtime.graph import load

REPORT = Path(__file__).resolve().parents[2] / "examples" / "report"
MODULES = [path.stem for path in REPORT.glob("*.py") if path.stem != "__main__"]


@pytest.fixture(scope="module")
def report() -> Iterator[dict[str, ModuleType]]:
    """Its modules, which find each other as they do when the folder is run."""
    sys.path.insert(0, str(REPORT))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(REPORT))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.mark.parametrize("path", sorted((REPORT / "graphs").glob("*.yaml")), ids=lambda path: path.stem)
def test_its_graphs_are_right_and_say_what_they_are(path: Path) -> None:
    assert load(path).graph.name == path.stem
    assert path.read_text().startswith("# ")


def test_cost_and_bcr_are_the_reports_to_the_last_digit_it_prints() -> None:
    done = subprocess.run(
        [sys.executable, str(REPORT), "cost", "--markdown"], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    rows = {
        cells[1]: cells
        for line in done.stdout.splitlines()
        if (cells := [cell.strip() for cell in line.split("|")])[1:]
    }
    for name in ("IDC-PD", "PDD"):
        for ours, theirs in ((4, 5), (6, 7)):
            assert rows[name][ours - 1] == rows[name][theirs - 1] != "–"
    assert rows["PDD"][7] == rows["PDD"][8] == "+32.4 % to +37.5 %"


def test_an_unknown_table_is_refused_by_name() -> None:
    done = subprocess.run([sys.executable, str(REPORT), "prices"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "no table is called prices: they are cost, " in done.stderr


def test_narrow_hits_take_all_connections_and_skewed_ones_do_not(report: dict[str, ModuleType]) -> None:
    transfers, line = report["transfers"], report["parameters"].fitted_line(transfers=3000)
    skewed, narrow = (transfers.figures(transfers.run(kind, line, 1)) for kind in ("skewed", "narrow"))
    assert narrow["pool"] > 0.8
    assert narrow["p50"] == pytest.approx(1.21, rel=0.3)
    assert skewed["pool"] < narrow["pool"] - 0.1
    assert skewed["p50"] < narrow["p50"] / 2
    assert skewed["queueing"] < narrow["queueing"] / 2


def test_the_kv_of_100_tokens_is_there_sooner_on_average_than_they_are_computed(report: dict[str, ModuleType]) -> None:
    handoff, transfers = report["handoff"], report["transfers"]
    probes = transfers.run("skewed", report["parameters"].fitted_line(transfers=2000), 2, probe=4.649e6).probes
    assert len(probes) == 100
    assert 0.05 < probes.min() <= probes.mean() < handoff.token_time() - 0.1


def test_one_set_of_parameters_gives_all_rows_nearly(report: dict[str, ModuleType]) -> None:
    ttft = report["ttft"]
    theirs = ttft.measured()
    (ours,) = ttft.simulated(report["models"].fitted(), (1,), requests=1500, warmup=1500, names=("cdc-pd", "pdd"))
    assert len(ours) == 12
    assert ours["pdd relay"] == pytest.approx(theirs["pdd relay"], abs=0.01)
    for name, value in ours.items():
        # Runs this short differ by a third and more.
        assert value == pytest.approx(theirs[name], rel=0.5), name


def test_our_policies_are_better_for_the_same_requests_on_the_same_hardware(report: dict[str, ModuleType]) -> None:
    better, numbers = report["better"], report["models"].fitted()
    cases = list(better.cases(numbers).values())
    theirs, ours = (better.run(case, numbers.before, seed=3, requests=1000) for case in (cases[0], cases[-1]))
    assert ours["second p90"] < 0.95 * theirs["second p90"]
    assert ours["gap p99"] < theirs["gap p99"]
    assert ours["relay"] < theirs["relay"]
    assert better.run(cases[-1], numbers.before, seed=3, requests=1000) == ours
