"""examples/plan/whole.py runs, and a search that looks at everything misses nothing."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests.planner.test_plan import GRAPH, ONE, PLAN, PROFILE

SCRIPT = Path(__file__).parents[2] / "examples" / "plan" / "whole.py"


def test_what_is_all_looked_at_is_the_best_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("graph", GRAPH), ("profile", PROFILE), ("plan", PLAN)):
        (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["whole.py", str(tmp_path / "plan.yaml"), "--set", ONE])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    found, whole, count = capsys.readouterr().out.splitlines()
    assert found.removeprefix("the search's best") == whole.removeprefix("the best of all")
    assert count.startswith("of 2 deployments by")
