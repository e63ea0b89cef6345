"""Finds plugins by their entry points, checks what they register, and finds classes by name."""

from __future__ import annotations

import inspect
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy
from pydantic import BaseModel

from pdd_runtime.errors import PluginError
from pdd_runtime.graph import nearest
from pdd_runtime.plugins import hookspecs
from pdd_runtime.plugins.discovery import Discovery
from pdd_runtime.plugins.engine import Engine
from pdd_runtime.plugins.handoff import HandoffConfig, HandoffStrategy
from pdd_runtime.plugins.latency import LatencyModel
from pdd_runtime.plugins.routing import RoutingPolicy
from pdd_runtime.plugins.settings import Place, configure
from pdd_runtime.plugins.transport import Transport

GROUP = "pdd_runtime.plugins"
ISOLATE = "PDD_PLUGINS"
"""Environment: load only these entry points, separated by commas."""


@dataclass(frozen=True)
class Kind:
    """One contract that plugins implement."""

    noun: str
    plural: str
    base: type[Any]
    config: type[BaseModel] = BaseModel

    @property
    def word(self) -> str:
        return self.noun.split()[0]

    @property
    def hook(self) -> str:
        return f"pdd_register_{self.plural.replace(' ', '_')}"


KINDS = (
    Kind("engine", "engines", Engine),
    Kind("transport", "transports", Transport),
    Kind("routing policy", "routing policies", RoutingPolicy),
    Kind("handoff strategy", "handoff strategies", HandoffStrategy, HandoffConfig),
    Kind("discovery", "discoveries", Discovery),
    Kind("latency model", "latency models", LatencyModel),
)


@dataclass(frozen=True)
class Origin:
    """Where a plugin comes from."""

    plugin: str
    """The entry point's name."""
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"plugin {self.plugin} ({self.distribution} {self.version})"


@dataclass(frozen=True)
class Registered:
    """One class that a plugin registered."""

    kind: Kind
    name: str
    cls: type[Any]
    origin: Origin


class PluginManager:
    """The classes of all installed plugins. `problems` has what is wrong with those that are broken: they are left
    out, the rest works."""

    def __init__(self) -> None:
        self.registered: list[Registered] = []
        self.problems: list[PluginError] = []
        self._origins: dict[str, Origin] = {}
        self._isolated: list[str] | None = None
        self._waiting: list[EntryPoint] = []
        """Not imported yet."""
        self._pluggy = pluggy.PluginManager("pdd_runtime")
        self._pluggy.add_hookspecs(hookspecs)

    def load(self, *, lazily: bool = False) -> None:
        """Import every plugin and take what it registers. Broken ones become `problems`. `lazily`: only when something
        is asked for, and at first those that are named like it or like its contract."""
        chosen = os.environ.get(ISOLATE)
        self._isolated = [name.strip() for name in chosen.split(",") if name.strip()] if chosen is not None else None
        points = sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value))
        self._waiting = [point for point in points if self._isolated is None or point.name in self._isolated]
        for name in self._isolated or ():
            if name not in {point.name for point in points}:
                self.problems.append(
                    PluginError(
                        f"{ISOLATE} names a plugin that is not installed: {name}",
                        fix=nearest(name, [point.name for point in points]) or f"remove it from {ISOLATE}",
                    )
                )
        if not lazily:
            self._take_waiting()
            self._report_clashes()

    def engine(self, name: str) -> type[Engine]:
        """The engine class called `name`. Raises `PluginError`, as the next five do."""
        return self._find(Engine, name)

    def transport(self, name: str) -> type[Transport]:
        return self._find(Transport, name)

    def routing(self, name: str) -> type[RoutingPolicy]:
        return self._find(RoutingPolicy, name)

    def handoff(self, name: str) -> type[HandoffStrategy]:
        return self._find(HandoffStrategy, name)

    def discovery(self, name: str) -> type[Discovery]:
        return self._find(Discovery, name)

    def latency(self, name: str) -> type[LatencyModel]:
        return self._find(LatencyModel, name)

    def configure(self, cls: type[Any], config: Mapping[str, Any], where: Place) -> Any:
        """`config` checked and completed by `cls.Config`. Raises `PluginError`."""
        return configure(f"{_kind_of(cls).noun} {cls.name}", cls.Config, config, where)

    def _take_waiting(self, names: Collection[str] | None = None) -> None:
        """Import them, or those of these names."""
        taken = [point for point in self._waiting if names is None or point.name in names]
        self._waiting = [point for point in self._waiting if point not in taken]
        for point in taken:
            self._take(point)

    def _take(self, point: EntryPoint) -> None:
        distribution = point.dist
        origin = Origin(
            point.name,
            distribution.name if distribution else "unknown distribution",
            distribution.version if distribution else "?",
        )
        try:
            plugin = point.load()
        except (Exception, SystemExit) as error:
            self._problem(
                f"{origin} cannot be imported",
                why=f"{point.value}: {_said(error)}",
                fix=f"install what it lacks, or remove {origin.distribution}",
            )
            return
        key = f"{origin.distribution}:{point.name}"
        if self._pluggy.is_registered(plugin) or self._pluggy.has_plugin(key):
            return
        try:
            self._pluggy.register(plugin, key)
            self._pluggy.check_pending()
        except pluggy.PluginValidationError as error:
            self._pluggy.unregister(plugin, key)
            self._problem(f"{origin} has a wrong hook", **_hook_fault(plugin, error))
            return
        if not self._pluggy.get_hookcallers(plugin):
            self._problem(
                f"{origin} registers nothing",
                why=f"{point.value} has no function marked with @hookimpl",
                fix=f"mark one of {', '.join(kind.hook for kind in KINDS)}",
            )
        others = [other for other in self._pluggy.get_plugins() if other is not plugin]
        for kind in KINDS:
            try:
                answers = self._pluggy.subset_hook_caller(kind.hook, others)()
            except Exception as error:
                self._problem(f"{origin}: its hook {kind.hook} failed", why=_said(error), fix=_blame(origin))
                continue
            for answer in answers:
                self._take_classes(kind, answer, origin)

    def _take_classes(self, kind: Kind, answer: object, origin: Origin) -> None:
        if not isinstance(answer, (list, tuple)):
            self._problem(
                f"{origin}: its hook {kind.hook} returned {answer!r}",
                why=f"it must return a list of {kind.base.__name__} classes",
                fix=_blame(origin),
            )
            return
        for cls in answer:
            fault = _class_fault(kind, cls)
            if fault:
                self._problem(
                    f"{origin}: its hook {kind.hook} registered {_called(cls)}, which is no {kind.noun}",
                    why=fault,
                    fix=f"see the contract, {kind.base.__module__}.{kind.base.__name__}",
                )
            elif not any(known.cls is cls and known.kind is kind for known in self.registered):
                self.registered.append(Registered(kind, cls.name, cls, origin))

    def _report_clashes(self) -> None:
        for kind in KINDS:
            for name in sorted({entry.name for entry in self._of(kind)}):
                if len(self._named(kind, name)) > 1:
                    self.problems.append(self._clash(kind, name))

    def _find(self, base: type[Any], name: str) -> type[Any]:
        kind = next(kind for kind in KINDS if kind.base is base)
        if self._waiting:
            self._take_waiting({name, kind.word, f"{name}-{kind.word}"})
            if not self._named(kind, name):
                self._take_waiting()
        found = self._named(kind, name)
        if len(found) > 1:
            raise self._clash(kind, name)
        if found:
            return found[0].cls
        names = sorted(entry.name for entry in self._of(kind))
        fix = "install the distribution that brings it; `pdd-runtime plugins` then lists it, or what is wrong with it"
        close = nearest(name, names)
        broken = next((problem.what for problem in self.problems if f"plugin {name} (" in problem.what), "")
        why = f"the {kind.plural} are: {', '.join(names) or 'none'}"
        if self._isolated is not None:
            why += f"; {ISOLATE} leaves out all plugins but {', '.join(self._isolated) or 'none'}"
        raise PluginError(
            f'no installed plugin brings a {kind.noun} called "{name}"'.replace("a engine", "an engine"),
            why=f"{broken}; {why}" if broken else why,
            fix=f"{close} Else {fix}" if close else fix,
        )

    def _clash(self, kind: Kind, name: str) -> PluginError:
        both = [
            f"{entry.cls.__module__}.{entry.cls.__qualname__} of {entry.origin}" for entry in self._named(kind, name)
        ]
        distributions = sorted({entry.origin.distribution for entry in self._named(kind, name)})
        return PluginError(
            f'{len(both)} plugins bring a {kind.noun} called "{name}"'.replace("a engine", "an engine"),
            why=" and ".join(both),
            fix=f"uninstall one of {', '.join(distributions)}, or choose plugins with {ISOLATE}",
        )

    def _of(self, kind: Kind) -> Iterable[Registered]:
        return (entry for entry in self.registered if entry.kind is kind)

    def _named(self, kind: Kind, name: str) -> list[Registered]:
        return [entry for entry in self._of(kind) if entry.name == name]

    def _problem(self, what: str, *, why: str, fix: str = "") -> None:
        self.problems.append(PluginError(what, why=why, fix=fix))


def load_plugins(*, lazily: bool = False) -> PluginManager:
    """All installed plugins, or those that the environment variable `PDD_PLUGINS` names. `lazily`: for a process that
    needs a few, of a graph that was checked with all of them; what it never asks for is not imported."""
    manager = PluginManager()
    manager.load(lazily=lazily)
    return manager


def _kind_of(cls: type[Any]) -> Kind:
    return next(kind for kind in KINDS if issubclass(cls, kind.base))


def _called(cls: object) -> str:
    return f"{cls.__module__}.{cls.__qualname__}" if isinstance(cls, type) else repr(cls)


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _class_fault(kind: Kind, cls: object) -> str:
    if not isinstance(cls, type):
        return "it is not a class"
    if not issubclass(cls, kind.base):
        return f"it is not a subclass of {kind.base.__name__}"
    if inspect.isabstract(cls):
        missing: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
        return f"it lacks {', '.join(sorted(missing))}"
    name: object = getattr(cls, "name", None)
    if not isinstance(name, str) or not name:
        return "it has no `name` (text)"
    config: object = getattr(cls, "Config", None)
    if not isinstance(config, type) or not issubclass(config, kind.config):
        return f"it has no `Config` (a pydantic model, subclass of {kind.config.__name__})"
    return ""


def _blame(origin: Origin) -> str:
    return f"report it to its authors, or remove {origin.distribution}"


def _hook_fault(plugin: object, error: pluggy.PluginValidationError) -> dict[str, str]:
    """Which of a plugin's hooks is wrong: one that does not exist, or one that wants arguments."""
    hooks = [kind.hook for kind in KINDS]
    for name, function in vars(plugin).items():
        if not hasattr(function, f"{hookspecs.hookimpl.project_name}_impl"):
            continue
        if name not in hooks:
            fix = nearest(name, hooks) or f"the hooks are {', '.join(hooks)}"
            return {"why": f"there is no hook {name}", "fix": fix}
        arguments = ", ".join(inspect.signature(function).parameters)
        if arguments:
            why = f"its {name} takes arguments that the hook does not give: {arguments}"
            return {"why": why, "fix": "remove them"}
    return {"why": " ".join(str(error).split()), "fix": f"the hooks are {', '.join(hooks)}"}
