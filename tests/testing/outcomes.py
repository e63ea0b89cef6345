"""What a suite says of a class that breaks its contract."""

from __future__ import annotations

from typing import Any, NamedTuple

from pdd_runtime.plugins.manager import KINDS
from pdd_runtime.testing.checking import module_for
from pdd_runtime.testing.suite_run import run_suites


class Outcomes(NamedTuple):
    """Names of tests, without their parameters."""

    passed: set[str]
    failed: set[str]


def outcomes(cls: type[Any]) -> Outcomes:
    """Of the suite of the class's kind, with its defaults."""
    return ran(module_for(next(kind for kind in KINDS if issubclass(cls, kind.base)), cls))


def ran(module: str) -> Outcomes:
    """Of a test module, given as text."""
    (cases,) = run_suites({"suite": module}).values()
    failed = {case.test.partition("[")[0] for case in cases if case.outcome == "failed"}
    return Outcomes({case.test.partition("[")[0] for case in cases} - failed, failed)
