"""Runs conformance suites as pytest runs them, and keeps what each test came to."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pdd_runtime.errors import PluginError
from pdd_runtime.testing import REWRITTEN

NEEDED = {"pytest": "pytest", "pytest_asyncio": "pytest-asyncio", "hypothesis": "hypothesis"}
"""Module to distribution: what the suites are made with."""


@dataclass(frozen=True)
class Case:
    """One test of a suite."""

    test: str
    outcome: Literal["passed", "failed", "skipped"]
    seconds: float
    why: str = ""
    """Of a failed one its traceback, of a skipped one the reason."""


@dataclass
class _Reporter:
    """A pytest plugin: takes reports, prints nothing."""

    on_case: Callable[[str, Case], None]
    interrupted: bool = False
    _setup: dict[str, Any] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)

    def pytest_configure(self, config: Any) -> None:
        # The option belongs to the terminal reporter, which is not there.
        config.option.tbstyle = "short"
        import pytest

        pytest.register_assert_rewrite(*(name for name in REWRITTEN if name not in sys.modules))

    def pytest_runtest_logreport(self, report: Any) -> None:
        key, _, test = report.nodeid.partition("::")
        test = test.partition("::")[2] or test
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        worst = self._setup.get(report.nodeid)
        if worst is None or report.failed:
            self._setup[report.nodeid] = worst = report if report.failed or report.skipped else worst
        if report.when != "teardown":
            return
        seconds = self._seconds.pop(report.nodeid)
        del self._setup[report.nodeid]
        if worst is None:
            case = Case(test, "passed", seconds)
        elif worst.failed:
            case = Case(test, "failed", seconds, worst.longreprtext)
        else:
            reason = worst.longrepr[2] if isinstance(worst.longrepr, tuple) else str(worst.longrepr)
            case = Case(test, "skipped", seconds, reason.removeprefix("Skipped: "))
        self.on_case(Path(key).stem, case)

    def pytest_keyboard_interrupt(self) -> None:
        self.interrupted = True

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            key = report.nodeid.partition("::")[0]
            self.on_case(Path(key).stem, Case("(import)", "failed", 0.0, report.longreprtext))


def require_pytest() -> None:
    """Raises `PluginError` where what the suites are made with is not installed."""
    lacking = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if lacking:
        raise PluginError(
            "the conformance suites cannot be run here",
            why=f"not installed: {', '.join(lacking)}",
            fix="pip install pdd-runtime[testing]",
        )


def run_suites(
    modules: Mapping[str, str], on_case: Callable[[str, Case], None] = lambda key, case: None
) -> dict[str, list[Case]]:
    """Run test modules, given as text by a key that is an identifier, apart from any project's pytest settings.
    `on_case` hears of each test as it ends. Raises `PluginError` where pytest is missing or cannot run."""
    require_pytest()
    import pytest

    cases: dict[str, list[Case]] = {key: [] for key in modules}
    if not modules:
        return cases

    def take(key: str, case: Case) -> None:
        key = key.removeprefix("test_")
        cases[key].append(case)
        on_case(key, case)

    reporter = _Reporter(take)
    with tempfile.TemporaryDirectory(prefix="pdd-check-") as folder, _set_apart(directory := Path(folder).resolve()):
        settings = directory / "pytest.ini"
        settings.write_text("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
        for key, text in modules.items():
            (directory / f"test_{key}.py").write_text(text)
        code = pytest.main(
            [
                str(directory),
                *("-c", str(settings), "--rootdir", str(directory), "--import-mode=importlib"),
                *("-p", "pytest_asyncio.plugin", "-p", "no:cacheprovider", "-p", "no:terminal"),
                "--continue-on-collection-errors",
            ],
            plugins=[reporter],
        )
        for key in modules:
            # Another run in this process may have a module of the same name.
            sys.modules.pop(f"test_{key}", None)
    if reporter.interrupted:
        raise KeyboardInterrupt
    if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        raise PluginError("pytest could not run the conformance suites", why=f"it ended with {code!r}")
    return cases


@contextmanager
def _set_apart(directory: Path) -> Iterator[None]:
    """What else is installed for pytest, or set for it in the environment, must not change the outcome; and nothing
    is to be left where the command was called."""
    set_here = {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_ADDOPTS": None,
        "PYTEST_PLUGINS": None,
        "HYPOTHESIS_STORAGE_DIRECTORY": str(directory / "hypothesis"),
    }
    before = {name: os.environ.get(name) for name in set_here}
    _set(set_here)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
