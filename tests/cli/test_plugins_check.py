"""`plugins check` on distributions as pip would have installed them."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from tests.cli.shell import Cli

POLICY = """
from pydantic import BaseModel
from pdd_runtime.errors import NoRoute
from pdd_runtime.plugins import hookimpl
from pdd_runtime.plugins.handoff import HandoffConfig, HandoffStrategy, Step

class Needy(HandoffConfig):
    tokens: int

class {cls}(HandoffStrategy):
    name = "{name}"
    {config}
    def step(self, view):
        if not view.main_ready or view.known == 0:
            return Step("wait")
        return {seal}

@hookimpl
def pdd_register_handoff_strategies():
    return [{cls}]
"""
RIGHT = 'Step("seal", max(view.known, 0 if view.relay_stopped else 1 + self.config.min_relay_tokens))'
CONFORMANCE = """
import pytest
from pdd_runtime.testing.handoff_suite import HandoffConformance
from plug_needy import Needy, Wanting

class TestNeedy(HandoffConformance):
    plugin = Wanting

    @pytest.fixture
    def strategy(self):
        return Wanting(Needy(tokens=3))
"""

Check = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def check(cli: Cli, tmp_path: Path) -> Check:
    """Lays out a distribution `plug-<name>` and checks it."""

    def run(name: str, conformance: str = "", **parts: str) -> tuple[int, dict[str, Any], str]:
        parts = {"cls": "Strategy", "name": name, "config": "", "seal": RIGHT} | parts
        (tmp_path / f"plug_{name}.py").write_text(POLICY.format(**parts))
        info = tmp_path / f"plug_{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: plug-{name}\nVersion: 1.0\n")
        entries = f"[pdd_runtime.plugins]\n{name} = plug_{name}\n"
        if conformance:
            (tmp_path / f"plug_{name}_conformance.py").write_text(conformance)
            entries += f"[pdd_runtime.conformance]\n{name} = plug_{name}_conformance\n"
        (info / "entry_points.txt").write_text(entries)
        done = cli("plugins", "check", f"Plug_{name}", "--format", "json", env={"PYTHONPATH": str(tmp_path)})
        return done.code, json.loads(done.out), done.err

    return run


def test_a_distribution_that_keeps_its_contracts_passes(check: Check) -> None:
    code, report, _ = check("good")
    assert code == 0
    assert report["ok"]
    assert (report["distribution"], report["version"], report["problems"]) == ("plug-good", "1.0", [])
    (checked,) = report["classes"]
    assert (checked["kind"], checked["name"], checked["failed"]) == ("handoff strategy", "good", 0)
    assert checked["passed"] > 10


def test_nothing_is_left_where_it_was_called(cli: Cli, check: Check) -> None:
    before = sorted(cli.directory.iterdir())
    check("good")
    assert sorted(cli.directory.iterdir()) == before


def test_a_broken_promise_is_named_with_what_was_asked(check: Check) -> None:
    code, report, _ = check("hasty", seal='Step("seal", view.known)')
    assert code == 1
    assert not report["ok"]
    failed = {test["test"].partition("[")[0]: test["why"] for test in report["classes"][0]["tests"] if test["why"]}
    assert "it sealed before the relay had its minimum" in failed["test_every_session_is_handed_off_or_ends"]
    assert "relay_rate=" in failed["test_every_session_is_handed_off_or_ends"]


def test_what_cannot_be_checked_says_what_to_provide(check: Check) -> None:
    code, report, _ = check("needy", cls="Wanting", config="Config = Needy\n")
    assert code == 1
    not_run = report["classes"][0]["not_run"]
    assert not_run["what"] == "it has settings without defaults"
    assert 'needs the setting "tokens"' in not_run["why"]
    assert 'project.entry-points."pdd_runtime.conformance"' in not_run["fix"]
    assert "class TestWanting(pdd_runtime.testing.handoff_suite.HandoffConformance)" in not_run["fix"]


def test_the_distributions_own_suites_are_run(check: Check) -> None:
    code, report, _ = check("needy", CONFORMANCE, cls="Wanting", config="Config = Needy\n")
    assert code == 0, report
    assert report["classes"][0]["by"] == "plug_needy_conformance.TestNeedy"


def test_a_plugin_that_does_not_register_is_a_problem(check: Check) -> None:
    code, report, _ = check("broken", config="import no_such_module")
    assert code == 1
    assert "plugin broken (plug-broken 1.0) cannot be imported" in report["problems"][0]["what"]
    assert report["classes"] == []


def test_a_plugin_that_is_left_out_is_not_taken_for_right(cli: Cli) -> None:
    done = cli("plugins", "check", "pdd-tcp", env={"PDD_PLUGINS": "routing"})
    assert done.code == 1
    assert "PDD_PLUGINS leaves them out" in done.err


def test_suites_that_cannot_be_imported_are_a_problem(check: Check) -> None:
    code, report, _ = check("needy", "import no_such_module", cls="Wanting", config="Config = Needy\n")
    assert code == 1
    assert "its conformance suites needy cannot be imported" in report["problems"][0]["what"]


def test_the_report_is_readable(cli: Cli, check: Check, tmp_path: Path) -> None:
    check("good")
    done = cli("plugins", "check", "plug-good", env={"PYTHONPATH": str(tmp_path)})
    assert done.code == 0
    assert "handoff strategy good" in done.out
    assert "passed" in done.out


@pytest.mark.parametrize("name", ["builtin", "torch", "llamacpp"])
def test_the_suites_that_are_shipped_can_be_found(name: str) -> None:
    (suite,) = entry_points(group="pdd_runtime.conformance", name=name)
    assert suite.load()


def test_an_unknown_distribution_is_2_and_names_the_nearest(cli: Cli) -> None:
    done = cli("plugins", "check", "pdd-tpc")
    assert done.code == 2
    assert 'did you mean "pdd-tcp"?' in done.err


def test_a_distribution_without_plugins_is_2(cli: Cli) -> None:
    done = cli("plugins", "check", "pytest")
    assert done.code == 2
    assert "brings no plugin" in done.err


def test_without_pytest_the_extra_is_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'pytest' else find(name, *rest)\n"
    )
    done = cli("plugins", "check", "pdd-tcp", env={"PYTHONPATH": str(tmp_path)})
    assert done.code == 2
    assert "not installed: pytest" in done.err
    assert "pip install pdd-runtime[testing]" in done.err
