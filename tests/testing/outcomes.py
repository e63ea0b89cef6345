"""What a suite says of a class that breaks its contract."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from pdd_runtime.plugins.manager import KINDS
from pdd_runtime.testing.checking import module_for
from pdd_runtime.testing.suite_run import run_suites

ONLY = """

for suite in [value for value in vars().values() if isinstance(value, type)]:
    for name in [name for name in dir(suite) if name.startswith("test_") and name not in {names}]:
        setattr(suite, name, None)
"""


class Outcomes(NamedTuple):
    """Names of tests, without their parameters."""

    passed: set[str]
    failed: set[str]


def outcomes(cls: type[Any], only: Iterable[str] = ()) -> Outcomes:
    """Of the suite of the class's kind, with its defaults; all of it, or those tests."""
    return ran(module_for(next(kind for kind in KINDS if issubclass(cls, kind.base)), cls), only)


def ran(module: str, only: Iterable[str] = ()) -> Outcomes:
    """Of a test module, given as text."""
    names = set(only)
    (cases,) = run_suites({"suite": module + (ONLY.format(names=names) if names else "")}).values()
    failed = {case.test.partition("[")[0] for case in cases if case.outcome == "failed"}
    return Outcomes({case.test.partition("[")[0] for case in cases} - failed, failed)
