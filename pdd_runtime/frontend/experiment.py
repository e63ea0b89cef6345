"""The variants of a graph in one frontend process: who gets which, what became of it, what was decided."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pdd_runtime.errors import RequestError
from pdd_runtime.frontend.job import Job
from pdd_runtime.frontend.requests import Body
from pdd_runtime.frontend.sticky import Headers, sticky_key
from pdd_runtime.graph import Graph
from pdd_runtime.observe import Timeline
from pdd_runtime.observe.pace import Pace
from pdd_runtime.observe.tally import Seen, Tallies
from pdd_runtime.pipeline.comparison import worse
from pdd_runtime.pipeline.decisions import Decision, Journal, Kind, digest, standing, weights
from pdd_runtime.pipeline.split import Split

log = logging.getLogger(__name__)

FILE = "variants.json"
"""Where decisions are kept, beside the graph."""
WINDOW = 600.0
"""Seconds that are of late, where there are no guardrails to say so."""
GUARDRAIL = "guardrail"
"""Who decides when nobody is asked."""


class Experiment(Collector):
    """Splits requests, counts them, and knows the decisions. Nothing in it waits."""

    def __init__(self, graph: Graph, journal: Journal) -> None:
        """Of a graph with variants."""
        self.graph = graph
        self._journal, self._spec = journal, graph.spec.experiment
        rails = self._spec.guardrails
        self.window = rails.window if rails else WINDOW
        """Seconds that are of late."""
        self.news = asyncio.Event()
        """Set whenever something was decided, here or elsewhere."""
        self._tallies = {name: Tallies(self.window) for name in graph.spec.variants}
        journal.look()
        self._known = journal.decisions
        """Those by which requests are split."""
        self._split = self._made()
        for name, decision in self.standing.items():
            log.warning("variant %s: %s", name, told(decision))

    @staticmethod
    def of(graph: Graph, directory: Path) -> Experiment | None:
        """`directory`: where the graph's file is. None: it has no variants."""
        if not graph.spec.variants:
            return None
        if os.access(directory, os.W_OK):
            return Experiment(graph, Journal(directory / FILE))
        log.warning("what is decided about variants is forgotten at a restart: %s cannot be written", directory)
        return Experiment(graph, Journal())

    # Requests

    def assign(self, asked: Body, job: Job, headers: Headers) -> Job:
        """The job as its variant's."""
        variant = self._split.of(sticky_key(self._spec.sticky, asked, job.sessions[0], headers))
        return job._replace(sessions=tuple(msgspec.structs.replace(each, variant=variant) for each in job.sessions))

    def ended(self, timeline: Timeline, status: int, seconds: float, pace: Pace | None) -> None:
        """Count a request. One that its variant could never have served says nothing about any."""
        tallies = self._tallies.get(timeline.variant)
        if tallies is not None and timeline.elsewhere != "incapable":
            tallies.saw(status, seconds, pace, timeline.elsewhere == "failed", timeline.body())

    def seen(self, *, late: bool = False) -> dict[str, Seen]:
        """By this process. `late`: of late only."""
        seen = {name: tallies.seen() for name, tallies in self._tallies.items()}
        return {name: each.only_late() for name, each in seen.items()} if late else seen

    def worse(self, seen: Mapping[str, Seen]) -> Iterator[tuple[str, str]]:
        """The variants that are to be rolled back, each with why."""
        if (rails := self._spec.guardrails) is None:
            return
        control = seen[self.graph.control].late
        for name, found in seen.items():
            if name != self.graph.control and self.weights[name] and (why := worse(rails, control, found.late)):
                yield name, why

    # Decisions

    @property
    def weights(self) -> Mapping[str, float]:
        """As they are now."""
        return self._split.weights

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """In the order in which they were made, wherever that was."""
        return self._journal.decisions

    @property
    def standing(self) -> dict[str, Decision]:
        """Those that hold, by variant."""
        return standing(self.graph, self.decisions)

    def share(self, variant: str) -> float:
        """Of all requests, how many it gets."""
        return self._split.share(variant)

    def decide(self, kind: Kind, variants: Iterable[str], by: str, why: str = "") -> tuple[Decision, ...]:
        """Returns what is new in it. Raises `RequestError` for what makes no sense, `LaunchError` where it cannot be
        kept."""
        names = [*variants]
        for name in names:
            if name not in self.graph.spec.variants:
                there = ", ".join(self.graph.spec.variants)
                raise RequestError(f"there is no variant {name!r}", where="variant", why=f"the variants are: {there}")
            if name == self.graph.control and kind in ("abort", "rollback"):
                raise RequestError(
                    f"{name} is the control, which serves what others cannot",
                    where="variant",
                    fix="promote another variant, and it gets no more requests",
                )

        def made(before: tuple[Decision, ...]) -> Iterator[Decision]:
            stands = standing(self.graph, before)
            at = before[-1].at if before else 0.0
            for name in names:
                holds = stands.get(name)
                if kind == "rollback" and (holds is not None and holds.kind != "promote"):
                    continue  # another process was first
                of = digest(self.graph, kind, name)
                # Later than all that is known here, whatever the clocks of two hosts say.
                at = max(time.time(), math.nextafter(at, math.inf))
                yield Decision(kind=kind, variant=name, by=by, why=why, at=at, of=of)

        new = self._journal.add(made)
        self._changed()
        return new

    def hear(self, decisions: Iterable[Decision]) -> None:
        """What another process has decided, of this launcher or another."""
        self._journal.hear(decisions)
        self._changed()

    def look(self) -> None:
        """The same, where nobody has told."""
        self.hear(())

    def _changed(self) -> None:
        """Go by what the journal has now."""
        before, self._known = frozenset(self._known), self._journal.decisions
        new = [each for each in self._known if each not in before]
        if not new:
            return
        for decision in new:
            log.warning("variant %s: %s", decision.variant, told(decision))
        self.news.set()
        split = self._made()
        if split.weights != self._split.weights:
            self._split = split
            for tallies in self._tallies.values():
                tallies.forget()

    def _made(self) -> Split:
        return Split(weights(self.graph, self.decisions), self._spec.salt)

    def collect(self) -> Iterable[Metric]:
        """For `/metrics`."""
        shares = GaugeMetricFamily("pdd_variant_share", "Of all requests, how many it gets now", labels=("variant",))
        out = GaugeMetricFamily(
            "pdd_variant_out", "1: it gets none, for it was aborted, or rolled back by a guardrail",
            labels=("variant", "by"),
        )  # fmt: skip
        stands = self.standing
        for name in self.graph.spec.variants:
            shares.add_metric((name,), self.share(name))
            decision = stands.get(name)
            for kind, by in (("abort", "operator"), ("rollback", GUARDRAIL)):
                out.add_metric((name, by), float(decision is not None and decision.kind == kind))
        return (shares, out)


def told(decision: Decision) -> str:
    """It in words."""
    did = {
        "promote": "promoted: it gets all requests",
        "abort": "aborted: it gets no more requests",
        "rollback": "rolled back: it gets no more requests",
        "resume": "resumed: it has its weight again",
    }[decision.kind]
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(decision.at))
    return f"{did} ({decision.by}, {at})" + (f": {decision.why}" if decision.why else "")
