"""The frontend processes of one graph: they share a port, so whichever is asked must know what any of them knows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from pdd_runtime.errors import PddError
from pdd_runtime.frontend.bulletin import Bulletin
from pdd_runtime.frontend.experiment import GUARDRAIL, Experiment
from pdd_runtime.frontend.limits import Ledger, Used
from pdd_runtime.frontend.service import Listed, Recent, Service
from pdd_runtime.observe.metrics import labelled
from pdd_runtime.observe.tally import Seen
from pdd_runtime.pipeline.decisions import Decision, Kind
from pdd_runtime.plugins.discovery import Discovery, Member
from pdd_runtime.plugins.messages import Empty, RequestId
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.rpc import Greeting, RpcContext, RpcServer, Tls, connect
from pdd_runtime.waiting import watched

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE = 2.0
"""Seconds for a sibling to answer."""
GUARD_EVERY = 1.0
"""Seconds between two looks at how variants do."""
SHARE_EVERY = 1.0
"""Seconds in which all have heard what the others' clients have used."""


class Found(msgspec.Struct, frozen=True):
    """A request's timeline; None: it is not known here."""

    body: dict[str, Any] | None


class Cancel(msgspec.Struct, frozen=True):
    """End a request; the answer is whether it ran there."""

    id: str
    by: str
    """Who says so, in words."""


class Look(msgspec.Struct, frozen=True):
    """What became of variants' requests: asked for."""

    late: bool
    """Only those of late, which is less."""


class Decided(msgspec.Struct, frozen=True):
    """This has been decided about variants."""

    decisions: tuple[Decision, ...]


class Siblings:
    """What all frontend processes know together; of one that is alone, what it knows. Each serves what it knows over
    a message plane of its own, to those who have the graph's secret, and asks the others when it is asked itself."""

    def __init__(
        self,
        service: Service,
        key: WorkerKey | None = None,
        tls: Tls | None = None,
        bulletin: Bulletin | None = None,
        *,
        several: bool = True,
    ) -> None:
        """`key`: which this is; None: there are never others. `bulletin`: of a graph with variants, for the frontends
        of other launchers. `several`: not only while one replaces another."""
        self._service, self._key, self._tls, self._several = service, key, tls, several
        self._bulletin = bulletin
        self._others: tuple[Member, ...] = ()
        self._far = False
        """Whether other launchers have frontends, which are not asked."""
        self._seen = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._ledger = Ledger()

    async def start(self, discovery: Discovery, greeting: Greeting, plane: RpcServer) -> None:
        """Answer the others on `plane`, and know who they are."""
        self._greeting = greeting
        plane.unary("frontend.timeline", RequestId, self._on_timeline)
        plane.unary("frontend.requests", Empty, self._on_requests)
        plane.unary("frontend.metrics", Empty, self._on_metrics)
        plane.unary("frontend.cancel", Cancel, self._on_cancel)
        plane.unary("frontend.used", Empty, self._on_used)
        plane.unary("frontend.seen", Look, self._on_seen)
        plane.unary("frontend.decided", Decided, self._on_decided)
        watching = asyncio.create_task(self._watch(discovery), name="siblings")
        self._watching = watched(watching, "other frontends that come and go are not seen any more")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])

    async def serving(self) -> bool:
        """Whether others answer on the port already, as soon as that can be known. Raises what keeps it from ever being
        known, as `Discovery.watch` does."""
        assert self._watching is not None
        seen = asyncio.create_task(self._seen.wait(), name="who is there")
        try:
            await asyncio.wait([seen, self._watching], return_when=asyncio.FIRST_COMPLETED)
        finally:
            seen.cancel()
        if not self._seen.is_set():
            self._watching.result()
        return any(member.state == "ready" for member in self._others)

    async def timeline(self, request_id: str) -> dict[str, Any] | None:
        """Of a request that any of them had."""
        if (timeline := self._service.timelines.get(request_id)) is not None:
            return timeline.body()
        answers = await self._ask("frontend.timeline", RequestId(request_id), Found)
        return next((found.body for found in answers.values() if found.body is not None), None)

    async def requests(self) -> list[Listed]:
        """Those that run, then the last that ended; the newest first in both."""
        answers = await self._ask("frontend.requests", Empty(), Recent)
        parts = [self._service.recent(), *answers.values()]
        # Those of one process are in order already, and sorting keeps it where the clock is too coarse.
        running = sorted((line for part in parts for line in reversed(part.running)), key=lambda line: line.seconds)
        ended = sorted((end for part in parts for end in part.ended), key=lambda end: end.at)
        return [*running, *(end.line for end in reversed(ended[-self._service.timelines.limit :]))]

    async def cancel(self, request_id: str, by: str) -> bool:
        """End a request, whichever of them has it. False: none runs it."""
        if self._service.cancel(request_id, by):
            return True
        return any((await self._ask("frontend.cancel", Cancel(request_id, by), bool)).values())

    async def share(self, ledger: Ledger) -> None:
        """Count what API keys use together. Endless."""
        self._ledger = ledger
        while True:
            await asyncio.sleep(SHARE_EVERY)
            if self._others:
                ledger.hear(await self._ask("frontend.used", Empty(), dict[str, Used]))

    async def guard(self, experiment: Experiment) -> None:
        """Take up what is decided about variants, and decide where a guardrail asks for it: one of the processes does
        that for all. Endless."""
        while True:
            await asyncio.sleep(GUARD_EVERY)
            try:
                experiment.look()
                if self._first:
                    for variant, why in experiment.worse(await self.seen(experiment, late=True)):
                        await self.decide(experiment, "rollback", (variant,), GUARDRAIL, why + self._counted_in)
            except PddError as error:
                log.error("the guardrails: %s", error)

    async def seen(self, experiment: Experiment, *, late: bool = False) -> dict[str, Seen]:
        """What became of each variant's requests, in all processes. `late`: of late only."""
        together = {name: Seen.none(experiment.window) for name in experiment.graph.spec.variants}
        others = await self._ask("frontend.seen", Look(late), dict[str, Seen])
        for part in (experiment.seen(late=late), *others.values()):
            for name in together.keys() & part.keys():
                together[name].merge(part[name])
        return together

    async def decide(
        self, experiment: Experiment, kind: Kind, variants: Iterable[str], by: str, why: str = ""
    ) -> tuple[Decision, ...]:
        """Returns what is new in it, when all processes go by it; those of other launchers, when they are there and
        discovery is. Raises `RequestError` and `LaunchError`."""
        new = experiment.decide(kind, variants, by, why)
        if new:
            await self._ask("frontend.decided", Decided(new), type(None))
            if self._bulletin is not None:
                await self._bulletin.carried(PATIENCE)
        return new

    @property
    def behind(self) -> list[WorkerKey]:
        """The frontends of other launchers that do not know yet all that was decided about variants."""
        return self._bulletin.behind() if self._bulletin else []

    @property
    def _counted_in(self) -> str:
        """Said where others count for themselves."""
        return f" (counted in {self._greeting.cluster})" if self._far else ""

    @property
    def _first(self) -> bool:
        """None that serves has a lower number."""
        ready = [member.key for member in self._others if member.state == "ready"]
        return self._key is None or all(self._key < key for key in ready)

    async def metrics(self) -> bytes:
        """Prometheus text; where there are several processes, with a label that says whose a series is."""
        own = self._service.metrics.text()
        if self._key is None or not self._several:
            return own
        answers = await self._ask("frontend.metrics", Empty(), bytes)
        return labelled({str(self._key.index): own, **{str(index): text for index, text in answers.items()}})

    async def _watch(self, discovery: Discovery) -> None:
        async for members in discovery.watch():
            # Of other clusters only those that one launcher has started on this host with us.
            here = [m for m in members if m.cluster == self._greeting.cluster or not discovery.across_hosts]
            self._others = tuple(m for m in here if m.role == "frontend" and m.plane and m.key != self._key)
            self._far = any(m.role == "frontend" and m not in here for m in members)
            if self._bulletin is not None:
                self._bulletin.hear(members, [member.key for member in self._others])
            self._seen.set()

    async def _ask(self, method: str, params: object, result: type[T]) -> dict[int, T]:
        """What the others answer, by index. One that does not, because it is just ending, is left out."""

        async def one(member: Member) -> None:
            try:
                connection = await connect(member.plane, self._greeting, tls=self._tls, timeout=PATIENCE)
                try:
                    answers[member.key.index] = await connection.call(method, params, result, timeout=PATIENCE)
                finally:
                    await connection.close()
            except PddError as error:
                log.warning("frontend/%d does not say what it knows: %s", member.key.index, error.what)

        answers: dict[int, T] = {}
        async with asyncio.TaskGroup() as group:
            for member in self._others:
                group.create_task(one(member))
        return answers

    async def _on_timeline(self, request: RequestId, context: RpcContext) -> Found:
        timeline = self._service.timelines.get(request.id)
        return Found(None if timeline is None else timeline.body())

    async def _on_requests(self, request: Empty, context: RpcContext) -> Recent:
        return self._service.recent()

    async def _on_cancel(self, request: Cancel, context: RpcContext) -> bool:
        return self._service.cancel(request.id, request.by)

    async def _on_used(self, request: Empty, context: RpcContext) -> dict[str, Used]:
        return self._ledger.used()

    async def _on_seen(self, request: Look, context: RpcContext) -> dict[str, Seen]:
        return self._service.experiment.seen(late=request.late) if self._service.experiment else {}

    async def _on_decided(self, request: Decided, context: RpcContext) -> None:
        if self._service.experiment is not None:
            self._service.experiment.hear(request.decisions)

    async def _on_metrics(self, request: Empty, context: RpcContext) -> bytes:
        return self._service.metrics.text()
