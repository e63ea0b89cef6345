"""Checks a plugin distribution: what it registers, and whether that keeps the contracts.

A class is checked by the suite of its kind. The distribution may ship suites of its own, for classes that need more
than the defaults of their `Config`: an entry point in the group `pdd_runtime.conformance` that names a module with
pytest classes, subclasses of the suites here, each with `plugin = TheClass`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from types import ModuleType
from typing import Any

from pdd_runtime.errors import PddError, PluginError
from pdd_runtime.graph import nearest
from pdd_runtime.plugins import PluginManager
from pdd_runtime.plugins.engine import Engine
from pdd_runtime.plugins.manager import GROUP, ISOLATE, KINDS, Kind, Registered
from pdd_runtime.testing.suite_run import Case, require_pytest, run_suites

CONFORMANCE = "pdd_runtime.conformance"
SUITES = {
    "engine": "pdd_runtime.testing.engine_suite:EngineConformance",
    "transport": "pdd_runtime.testing.transport_suite:TransportConformance",
    "routing policy": "pdd_runtime.testing.routing_suite:RoutingConformance",
    "handoff strategy": "pdd_runtime.testing.handoff_suite:HandoffConformance",
    "discovery": "pdd_runtime.testing.discovery_suite:DiscoveryConformance",
    "latency model": "pdd_runtime.testing.latency_suite:LatencyConformance",
}
"""Kind to the class of its suite."""
_HOOKS = f"return one from a hook: {', '.join(kind.hook for kind in KINDS)}"


@dataclass
class Checked:
    """One registered class, and what its suite came to."""

    entry: Registered
    by: str = ""
    """Who gave the fixtures: `the defaults of its Config`, or the distribution's own class."""
    cases: list[Case] = field(default_factory=list)
    not_run: PddError | None = None
    """Why there are no cases."""

    def count(self, outcome: str) -> int:
        return sum(case.outcome == outcome for case in self.cases)

    @property
    def ok(self) -> bool:
        """It was checked, and no promise is broken."""
        return self.not_run is None and self.count("passed") > 0 and self.count("failed") == 0


@dataclass
class Report:
    """What is known of one distribution."""

    distribution: str
    version: str
    problems: list[PddError]
    """Of its registration: see `PluginManager.problems`."""
    classes: list[Checked]

    @property
    def ok(self) -> bool:
        return not self.problems and all(checked.ok for checked in self.classes)


def check(
    name: str, manager: PluginManager, on_case: Callable[[Checked, Case], None] = lambda checked, case: None
) -> Report:
    """Check the distribution called `name`. `on_case` hears of each test as it ends. Raises `PluginError` where there
    is nothing to check, or pytest is missing."""
    require_pytest()
    found = _distribution(name)
    title = found.metadata["Name"]
    problems: list[PddError] = [problem for problem in manager.problems if _speaks_of(title, problem)]
    shipped = _shipped(found, problems)
    classes = [
        Checked(entry) for entry in manager.registered if _canonical(entry.origin.distribution) == _canonical(title)
    ]
    if not classes and not problems:
        why = f"the environment variable {ISOLATE} leaves them out" if ISOLATE in os.environ else ""
        problems.append(PluginError("its plugins register no class", why=why, fix="" if why else _HOOKS))
    modules: dict[str, str] = {}
    for number, checked in enumerate(classes):
        own = [suite for suite in shipped if getattr(suite, "plugin", None) is checked.entry.cls]
        if own:
            checked.by = ", ".join(f"{suite.__module__}.{suite.__qualname__}" for suite in own)
            modules[f"case_{number}"] = "\n".join(map(_import, own))
            continue
        checked.not_run = _obstacle(checked.entry, manager)
        if checked.not_run is None:
            checked.by = "the defaults of its Config"
            modules[f"case_{number}"] = module_for(checked.entry.kind, checked.entry.cls)
    of_key = {f"case_{number}": checked for number, checked in enumerate(classes)}
    for key, cases in run_suites(modules, lambda key, case: on_case(of_key[key], case)).items():
        of_key[key].cases = cases
    return Report(title, found.version, problems, classes)


def module_for(kind: Kind, cls: type[Any]) -> str:
    """A test module that runs the kind's suite over `cls` with its defaults: what its author would write."""
    module, _, suite = SUITES[kind.noun].partition(":")
    return (
        f"from {module} import {suite} as Suite\n"
        f"from {cls.__module__} import {cls.__qualname__} as Plugin\n\n\n"
        f"class Test{cls.__qualname__}(Suite):\n"
        f"    plugin = Plugin\n\n\n"
        "del Suite\n"
    )


def _distribution(name: str) -> Distribution:
    try:
        found = distribution(name)
    except (PackageNotFoundError, ValueError):
        names = sorted({point.dist.name for point in entry_points(group=GROUP) if point.dist})
        raise PluginError(
            f"no distribution called {name} is installed",
            why=f"those with plugins are: {', '.join(names) or 'none'}",
            fix=nearest(name, names) or f"pip install {name}",
        ) from None
    if not found.entry_points.select(group=GROUP):
        raise PluginError(
            f"{found.metadata['Name']} {found.version} brings no plugin",
            why=f"it has no entry point in the group {GROUP}",
            fix=f'name your module in its pyproject.toml: [project.entry-points."{GROUP}"], and install it again',
        )
    return found


def _shipped(found: Distribution, problems: list[PddError]) -> list[type[Any]]:
    """The suites that the distribution brings for its classes."""
    suites: list[type[Any]] = []
    for point in found.entry_points.select(group=CONFORMANCE):
        try:
            module = point.load()
        except Exception as error:
            problems.append(
                PluginError(
                    f"its conformance suites {point.name} cannot be imported",
                    where=point.value,
                    why=f"{type(error).__name__}: {' '.join(str(error).split())}",
                )
            )
            continue
        own = _classes(module) if isinstance(module, ModuleType) else []
        suites += own
        if not own:
            problems.append(
                PluginError(
                    f"its conformance suites {point.name} are none",
                    where=point.value,
                    why="a module is wanted, with classes called Test…, each with `plugin = TheClass`",
                )
            )
    return suites


def _classes(module: ModuleType) -> list[type[Any]]:
    return [
        value
        for name, value in vars(module).items()
        if name.startswith("Test") and isinstance(value, type) and getattr(value, "plugin", None) is not None
    ]


def _import(suite: type[Any]) -> str:
    return f"from {suite.__module__} import {suite.__qualname__}"


def _obstacle(entry: Registered, manager: PluginManager) -> PddError | None:
    """Why the suite cannot run over a class with nothing but its defaults."""
    cls, how = entry.cls, _example(entry)
    if not cls.__qualname__.isidentifier():
        return PluginError("its class is made inside a function", why=f"it is {cls.__qualname__}", fix=how)
    if issubclass(cls, Engine):
        return PluginError(
            "an engine needs a model to be checked with",
            why=f"{entry.origin.distribution} has no entry point in the group {CONFORMANCE} with a suite for it",
            fix=how,
        )
    try:
        manager.configure(cls, {}, f"{entry.kind.noun} {entry.name}")
    except PluginError as error:
        return PluginError("it has settings without defaults", why=error.what, fix=how)
    return None


def _example(entry: Registered) -> str:
    module, _, suite = SUITES[entry.kind.noun].partition(":")
    return (
        f'in pyproject.toml: [project.entry-points."{CONFORMANCE}"] {entry.name} = "your.module", and in that module '
        f"class Test{entry.cls.__name__}({module}.{suite}) with plugin = {entry.cls.__name__} and the suite's fixture"
    )


def _speaks_of(title: str, problem: PddError) -> bool:
    return f"({title} " in problem.what or f"({title} " in problem.why


def _canonical(name: str) -> str:
    """As the packaging standard compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()
