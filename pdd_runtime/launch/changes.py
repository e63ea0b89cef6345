"""Changes of a graph that runs: one at a time, whoever asks for it, and to its end when they leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import ValidationError

from pdd_runtime.errors import GraphError, LaunchError, PddError
from pdd_runtime.graph import Graph
from pdd_runtime.launch.child import Child, ChildSpec
from pdd_runtime.launch.crew import Crew
from pdd_runtime.launch.difference import Change, difference, unchangeable
from pdd_runtime.launch.forms import Form, forms
from pdd_runtime.launch.orders import Apply, Manner, Plan, Progress, Restart, Wanted
from pdd_runtime.launch.part import Part
from pdd_runtime.launch.roll import Roll
from pdd_runtime.launch.slot import Slot

log = logging.getLogger(__name__)


class Stage(Protocol):
    """The launcher, as a change sees it."""

    graph: Graph
    part: Part
    crew: Crew

    async def becomes(self, graph: Graph, source: str) -> Mapping[Slot, ChildSpec]:
        """From now on this is the graph, and what starts is made from it. Raises a `PddError`, and then nothing is
        changed."""
        ...

    def specs(self) -> Mapping[Slot, ChildSpec]:
        """What is started, by its place."""
        ...

    def is_ready(self, child: Child) -> bool: ...

    async def until(self, condition: Callable[[], bool]) -> None: ...

    async def met(self, child: Child) -> None: ...

    def changed(self) -> None:
        """Something to tell has changed."""
        ...


@dataclass
class _Course:
    """One change under way."""

    steps: list[str] = field(default_factory=list)
    error: PddError | None = None
    over: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()


class Changes:
    """Plans them, and makes them."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._course: _Course | None = None
        self._task: asyncio.Task[None] | None = None
        self.failed = ""
        """Why the last one was not made whole."""

    @property
    def doing(self) -> str:
        """The step that is being made; empty: nothing is changed at the moment."""
        return self._course.steps[-1] if self._course and self._course.steps else ""

    def plan(self, wanted: Wanted) -> Plan:
        """What applying it would do. Raises `GraphError` where it is no graph, or another one."""
        graph = self._graph(wanted)
        refused = tuple(error.to_wire() for error in unchangeable(self._stage.graph, graph))
        return Plan(difference(self._running(), forms(graph, self._stage.part)), refused)

    async def apply(self, order: Apply) -> AsyncGenerator[Progress, None]:
        """Raises `GraphError` and `LaunchError`; before the first step nothing has been done then."""
        plan = self.plan(order.wanted)
        if plan.refused:
            raise PddError.from_wire(plan.refused[0])
        self._check_free()
        specs = await self._stage.becomes(self._graph(order.wanted), order.wanted.source)
        for child in self._stage.crew.children:
            # Who comes back by itself meanwhile comes back as it is wanted.
            child.spec = specs.get(child.spec.slot, child.spec)
        async for step in self._follow(self._begin(plan.changes, order.manner)):
            yield step

    async def restart(self, order: Restart) -> AsyncGenerator[Progress, None]:
        """Raises `LaunchError` where there is no such process."""
        slots = [
            slot for slot in self._stage.specs() if order.pool in ("", slot.pool) and order.index in (None, slot.index)
        ]
        if not slots:
            pools = ", ".join(dict.fromkeys(slot.pool for slot in self._stage.specs()))
            name = order.pool if order.index is None else f"{order.pool}/{order.index}"
            raise LaunchError(f"there is no process {name} here", why=f"the pools are: {pools}")
        self._check_free()
        changes = [Change("replace", slot.pool, slot.index) for slot in slots]
        async for step in self._follow(self._begin(changes, order.manner)):
            yield step

    async def stop(self) -> None:
        """Make no further step."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _graph(self, wanted: Wanted) -> Graph:
        try:
            graph = Graph.model_validate(wanted.graph)
        except ValidationError as error:
            raise GraphError("this is not a graph", where=wanted.source, why=str(error)) from None
        if graph.name != self._stage.graph.name:
            raise GraphError(f"graph {graph.name} is not graph {self._stage.graph.name}", where=wanted.source)
        return graph

    def _running(self) -> dict[Slot, Form]:
        return {child.spec.slot: child.form for child in self._stage.crew.children if not child.stopping}

    def _check_free(self) -> None:
        if self._course is not None:
            raise LaunchError(
                "the graph is being changed already", why=self.doing, fix="wait until that is done; `ps` shows it"
            )

    def _begin(self, changes: Sequence[Change], manner: Manner) -> _Course:
        self._course = course = _Course()
        self.failed = ""
        self._task = asyncio.create_task(self._make(course, changes, manner), name="change")
        return course

    async def _make(self, course: _Course, changes: Sequence[Change], manner: Manner) -> None:
        def say(what: str) -> None:
            log.info("%s", what)
            course.steps.append(what)
            course.tell()
            self._stage.changed()

        stage = self._stage
        roll = Roll(stage.crew, stage.specs(), manner, ready=stage.is_ready, until=stage.until, met=stage.met, say=say)
        try:
            say(_summary(changes))
            await roll.run(changes)
        except PddError as error:
            log.error("the change stops here: %s", error)
            course.error, self.failed = error, f"the last change was not made whole: {error.what}: {error.why}"
        except asyncio.CancelledError:
            course.error = LaunchError("the graph was stopped while it was changed")
            raise
        finally:
            course.over, self._course = True, None
            course.tell()
            stage.changed()

    async def _follow(self, course: _Course) -> AsyncGenerator[Progress, None]:
        told = 0
        while True:
            news = course.news
            for what in course.steps[told:]:
                yield Progress(what)
            told = len(course.steps)
            if course.over:
                break
            await news.wait()
        if course.error is not None:
            raise course.error


def _summary(changes: Sequence[Change]) -> str:
    """`3 to add, 1 to replace`."""
    counts = {kind: sum(change.kind == kind for change in changes) for kind in ("add", "replace", "remove")}
    return ", ".join(f"{count} to {kind}" for kind, count in counts.items() if count) or "nothing is to be done"
