"""The simulator as wheels may have it, compiled: what its sources promise, it keeps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HELD = [
    "tests/planner/simulate", "tests/pipeline/test_placement.py", "tests/planner/latency/test_roofline.py",
    "tests/planner/latency/test_table.py", "tests/planner/test_search.py",
]  # fmt: skip
"""What is compiled is tested there."""
PLAYED = """
import json, sys
from pathlib import Path
from pdd_runtime.graph import load
from pdd_runtime.planner import read_workload
from pdd_runtime.planner.pool_model import pool_models
from pdd_runtime.planner.simulate import Failure, Scenario, simulate, simulation
from pdd_runtime.plugins import load_plugins

plugins, graphs, made = load_plugins(), Path(sys.argv[1]), []
for name in ("pdd", "idc-pd"):
    for routing in ("hit-threshold", "predictive", "never-relay"):
        graph = load(graphs / f"{name}.yaml", [f"spec.routing={{plugin: {routing}}}"]).graph
        broken = (Failure(at=20.0, duration=9.0, name="main", index=0),)
        scenario = Scenario(graph, pool_models(graph, plugins), plugins, failures=broken)
        for workload in ("report", "chat"):
            made.append(simulate(scenario, read_workload(workload), requests=400, seed=3).to_json())
print(json.dumps({"compiled": not simulation.__file__.endswith(".py"), "made": made}))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which(os.environ.get("CC", "cc")) is None, reason="no C compiler is there"),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel that was built with it has in it."""
    into = tmp_path_factory.mktemp("wheel")
    command = ["make", "--assume-old=install", "wheel", f"BIN={Path(sys.executable).parent}", f"DIST={into}"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = into.glob("*.whl")
    assert not wheel.name.endswith("-none-any.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(into / "unpacked")
    return into / "unpacked"


def run(tree: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Of a Python that takes the package from `tree`, and tests from here."""
    environment = os.environ | {"PYTHONPATH": f"{tree}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_it_gives_the_very_same_figures(tree: Path) -> None:
    figures = []
    for each in (ROOT, tree):
        made = run(each, "-c", PLAYED, str(ROOT / "examples/report/graphs"))
        assert made.returncode == 0, made.stderr
        figures.append(json.loads(made.stdout))
    sources, compiled = figures
    assert (sources["compiled"], compiled["compiled"]) == (False, True)
    assert len(sources["made"]) == 12
    assert sources["made"] == compiled["made"]


def test_it_passes_the_tests_of_its_sources(tree: Path) -> None:
    options = ["-q", "-o", "pythonpath=", "-p", "no:cacheprovider", f"--ignore={Path(__file__).relative_to(ROOT)}"]
    made = run(tree, "-m", "pytest", *options, *HELD)
    assert made.returncode == 0, made.stdout + made.stderr


def test_sources_are_left_as_they_are() -> None:
    assert not [str(path) for path in (ROOT / "pdd_runtime").rglob("*.so")]
