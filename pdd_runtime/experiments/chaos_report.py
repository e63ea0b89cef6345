"""What a game day has shown, and whether it is well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from pdd_runtime.experiments.holdings import Holdings, Leak
from pdd_runtime.experiments.storm import Made, Stream
from pdd_runtime.graph import Graph

if TYPE_CHECKING:
    from pdd_runtime.experiments.chaos import ChaosPlan


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class FaultMade(_Form):
    """A fault, and whom it touched. Times are seconds from the beginning of the traffic."""

    kind: str
    target: str
    at: float
    seconds: float
    struck: tuple[str, ...]
    """Processes; none: nobody of that kind ran at that moment."""
    error: str
    """Why it could not be made; empty: it was."""
    touched: tuple[str, ...]
    """Ids of requests that were under way at what was struck."""


class Failed(_Form):
    """A stream that is not as it should be."""

    id: str
    """Of its request; empty: it got none."""
    at: float
    why: str
    position: int
    """The token at which it is not: the first that is another, or that came late, or did not come."""
    timeline: dict[str, Any] | None
    """As `GET /pdd/requests/{id}` told it."""


class Gaps(_Form):
    """The longest wait between two tokens of each stream, in seconds."""

    longest: float
    p99: float
    undisturbed: float
    """The longest before any fault."""


class ChaosReport(_Form):
    """The whole result; `ok` is the verdict, and `reasons` say why not."""

    graph: str
    seed: int
    seconds: float
    """How long there was traffic."""
    ok: bool
    reasons: tuple[str, ...]
    faults: tuple[FaultMade, ...]
    streams: int
    """Answers that ended, well or not."""
    touched: int
    """Those among them that a fault met at what it struck."""
    recovered: int
    """Those whose timeline tells of a recovery."""
    same: int
    """Those whose tokens are those of their undisturbed run."""
    changed: int
    errors: int
    unsteady: int
    """Requests whose undisturbed runs differ among themselves: their streams count neither as same nor as changed."""
    refused: int
    """Answers that asked to come back (429, 503), and were asked for again."""
    tokens: int
    """Compared."""
    gaps: Gaps
    first_token: float
    """The longest wait for one, in seconds, refusals included."""
    failed: tuple[Failed, ...]
    leaks: tuple[str, ...]
    restarts: Mapping[str, int]
    """Of each process that was started again."""
    unasked: Mapping[str, int]
    """Those among them that no fault had asked for."""
    back: float | None
    """Seconds from the end of the last fault until every process was ready; None: not within the time for it."""
    memory: Mapping[str, tuple[int, int]]
    """Resident bytes before and after, of processes that ran throughout. Told, not judged."""


@dataclass(frozen=True)
class Seen:
    """What there is to be judged. Times are those of `pdd_runtime.clock`."""

    streams: Sequence[Stream]
    wanted: Mapping[int, Sequence[int]]
    """Tokens of each request, undisturbed."""
    steady: frozenset[int]
    """Requests that were answered alike twice."""
    calm: Sequence[Stream]
    """Undisturbed ones, of as many at once."""
    begun: float
    made: Sequence[Made]
    before: Holdings
    after: Holdings
    leaks: Sequence[Leak]
    restarted: Mapping[str, int]
    """How often each process was started again."""
    back: float | None
    """As in the report."""

    def report(self, graph: Graph, plan: ChaosPlan) -> ChaosReport:
        streams = self.streams
        steady = [one for one in streams if one.asked.number in self.steady]
        deviations = {id(one): one.deviation(self.wanted[one.asked.number]) for one in steady}
        touched = [_touched(one, streams) for one in self.made]
        gaps = sorted(stream.gap for stream in streams)
        facts: dict[str, Any] = {
            "faults": tuple(self._fault(one, names) for one, names in zip(self.made, touched, strict=True)),
            "streams": len(streams),
            "touched": len({name for names in touched for name in names}),
            "recovered": sum(bool((one.outcome.timeline or {}).get("recoveries")) for one in streams),
            "same": sum(one.outcome.error is None and deviations[id(one)] is None for one in steady),
            "changed": sum(position is not None for position in deviations.values()),
            "errors": sum(one.outcome.error is not None for one in streams),
            "unsteady": len(self.wanted) - len(self.steady),
            "refused": sum(one.refused for one in streams),
            "tokens": sum(len(one.outcome.tokens) for one in steady),
            "gaps": Gaps(
                longest=gaps[-1] if gaps else 0.0,
                p99=gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))] if gaps else 0.0,
                undisturbed=max((one.gap for one in self.calm), default=0.0),
            ),
            "first_token": max((s.outcome.stamps[0] - s.outcome.due for s in streams if s.outcome.stamps), default=0.0),
            "failed": tuple(
                failed for one in streams if (failed := self._failed(one, deviations.get(id(one)), plan)) is not None
            ),
            "leaks": tuple(map(str, self.leaks)),
            "restarts": {name: count for name, count in self.restarted.items() if count},
            "unasked": _unasked(self.made, self.restarted),
            "back": self.back,
            "memory": {
                name: (self.before.vitals[name].memory, vitals.memory)
                for name, vitals in self.after.vitals.items()
                if self.after.epochs[name] == self.before.epochs.get(name)
            },
        }
        reasons = tuple(_reasons(facts, plan))
        seconds = max((one.outcome.ended for one in streams), default=self.begun) - self.begun
        return ChaosReport(graph=graph.name, seed=plan.seed, seconds=seconds, ok=not reasons, reasons=reasons, **facts)

    def _fault(self, one: Made, touched: Sequence[str]) -> FaultMade:
        return FaultMade(
            kind=one.fault.kind,
            target=one.fault.target,
            at=one.at - self.begun,
            seconds=one.fault.seconds,
            struck=one.struck,
            error=one.error,
            touched=tuple(touched),
        )

    def _failed(self, one: Stream, deviation: int | None, plan: ChaosPlan) -> Failed | None:
        if one.outcome.error is not None:
            why, position = one.outcome.error, len(one.outcome.tokens)
        elif deviation is not None:
            why, position = "its tokens are others than undisturbed", deviation
        elif one.gap > plan.longest_gap:
            why, position = f"it stood still for {one.gap:.2f} s", one.gap_at
        else:
            return None
        outcome = one.outcome
        return Failed(
            id=outcome.request_id,
            at=outcome.sent - self.begun,
            why=why,
            position=position,
            timeline=outcome.timeline,
        )


def _touched(made: Made, streams: Sequence[Stream]) -> list[str]:
    """The requests that were under way when it was made, at those it struck; of what strikes no process, all."""
    end = made.ended or made.at
    found = []
    for stream in streams:
        outcome = stream.outcome
        if not outcome.request_id or outcome.sent > end or outcome.ended < made.at:
            continue
        events = (outcome.timeline or {}).get("events", ())
        met = any(event["worker"] in made.struck and outcome.sent + event["t"] <= end for event in events)
        if met or made.fault.kind in ("cut", "etcd", "disk"):
            found.append(outcome.request_id)
    return found


def _unasked(made: Sequence[Made], restarted: Mapping[str, int]) -> dict[str, int]:
    asked: dict[str, int] = {}
    for one in made:
        if one.fault.kind in ("kill", "cluster"):
            for name in one.struck:
                asked[name] = asked.get(name, 0) + 1
    return {name: more for name, count in restarted.items() if (more := count - asked.get(name, 0)) > 0}


def _reasons(facts: Mapping[str, Any], plan: ChaosPlan) -> Iterable[str]:
    gaps: Gaps = facts["gaps"]
    if not facts["same"]:
        yield "no stream ended well"
    if facts["errors"]:
        yield f"{facts['errors']} streams ended in an error"
    if facts["changed"]:
        yield f"{facts['changed']} streams have other tokens than undisturbed"
    if gaps.longest > plan.longest_gap:
        yield f"a stream stood still for {gaps.longest:.2f} s, which is more than {plan.longest_gap:g} s"
    if facts["leaks"]:
        yield f"something is left: {'; '.join(facts['leaks'])}"
    if facts["unasked"]:
        yield f"restarts that no fault asked for: {', '.join(f'{n} {name}' for name, n in facts['unasked'].items())}"
    if facts["back"] is None:
        yield f"not all processes were ready again after {plan.recovery:g} s"
    if wrong := [one for one in facts["faults"] if one.error]:
        yield f"{len(wrong)} faults could not be made: {wrong[0].error}"
