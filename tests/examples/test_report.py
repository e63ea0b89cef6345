"""The report's tables, at small sizes."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
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


def test_what_a_fit_finds_is_written_where_it_is_read_and_the_rest_stays(
    report: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit, parameters, models = report["fit"], report["parameters"], report["models"]
    shutil.copy(REPORT / "parameters.yaml", tmp_path)
    monkeypatch.setattr(fit, "HERE", tmp_path)
    monkeypatch.setattr(parameters, "HERE", tmp_path)
    before = (REPORT / "parameters.yaml").read_text().splitlines()
    found = replace(models.fitted(), flow_rate=1.234e7, slots=31, growth=0.0625)
    fit.write(found)
    parameters.parameters.cache_clear()
    try:
        assert models.as_dict(models.fitted()) == pytest.approx(models.as_dict(found), rel=1e-9)
        assert parameters.fitted_line().flow_rate == 1.3e8
    finally:
        parameters.parameters.cache_clear()
    after = (tmp_path / "parameters.yaml").read_text().splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert [new.split(":")[0].strip() for _, new in changed] == ["flow_rate", "slots", "growth"]
    assert "flow_rate: 12340000.0 # bytes/s" in changed[0][1]


def test_a_short_fit_ends_at_the_bottom_or_at_a_bound(report: dict[str, ModuleType]) -> None:
    refit, objective = report["refit"].refit, report["objective"]
    names = ["pass_time", "growth"]
    goal, scale = np.log([0.2, 0.3]), np.array([[3.0, 1.0], [0.5, 2.0], [1.0, -1.0]])

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.tanh(scale @ (x - goal) / 4)

    x, chi2 = refit(residuals, np.log([0.1, 0.1]), scale / 4, names, 20)
    assert np.exp(x) == pytest.approx([0.2, 0.3], rel=0.15)
    assert chi2 < 2 * report["refit"].LEAST < 0.1 * np.sum(np.square(residuals(np.log([0.1, 0.1]))))

    goal = np.log([0.2, 5.0])
    x, _ = refit(residuals, np.log([0.2, 0.5]), scale / 4, names, 20)
    assert np.exp(x[1]) == pytest.approx(objective.PARAMETERS["growth"].high)


def test_an_interval_ends_where_the_objective_has_risen_enough(report: dict[str, ModuleType]) -> None:
    profiles = report["profiles"]
    goal = profiles.RISE**0.5
    assert profiles._crossing([(0.0, 0.0), (0.5, goal / 2)]) == pytest.approx(1.0)
    assert profiles._crossing([(0.0, 0.0), (0.5, goal / 2), (1.0, goal * 1.5)]) == pytest.approx(0.75)
    assert profiles._crossing([(0.0, 0.0), (0.4, 0.0)]) == pytest.approx(1.0), "no further than has been seen by far"


def test_every_rival_is_another_model_of_all_three_deployments(report: dict[str, ModuleType]) -> None:
    structures, numbers = report["structures"].STRUCTURES, report["models"].fitted()
    names = report["published"].DEPLOYMENTS

    def made(title: str) -> list[object]:
        structure = structures[title]
        own = structure.complete(replace(numbers, **structure.given, **structure.start))
        cases = [structure.scenario(name, own) for name in names]
        return [own, [(case.links, _models(case.pools)) for case in cases]]

    for title in structures:
        assert (made(title) == made("")) == (title == ""), title
    assert "relay" not in structures["one step"].free(report["objective"].NAMES)


def _models(pools: dict[str, object]) -> list[object]:
    return [
        (name, type(pool.latency), pool.latency.config, pool.batch_limit)  # type: ignore[attr-defined]
        for name, pool in pools.items()
    ]


def test_a_deployment_is_simulated_again_only_for_what_it_knows_of(report: dict[str, ModuleType]) -> None:
    objective, ttft, models = report["objective"], report["ttft"], report["models"]
    runs, numbers = objective.Runs(), models.fitted()
    first = runs.logs(numbers, (5,))
    assert len(runs._done) == 3
    later = runs.logs(replace(numbers, before=numbers.before + 1), (5,))
    assert len(runs._done) == 3
    runs.logs(replace(numbers, lacking=2 * numbers.lacking), (5,))
    assert len(runs._done) == 4
    names = list(ttft.measured())
    place = names.index("pdd ttft p90")
    again = ttft.run(models.scenario("pdd", numbers), ttft.rate("pdd"), 5, numbers.before)
    assert np.exp(first[0, place]) == pytest.approx(again["ttft p90"])
    assert np.exp(later[0, place]) == pytest.approx(again["ttft p90"] + 1)
    assert np.exp(later[0, names.index("pdd relay")]) == pytest.approx(again["relay"])
