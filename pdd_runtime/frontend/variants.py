"""What operators see of a graph's variants, and decide about them: `/pdd/variants`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from pdd_runtime.errors import RequestError
from pdd_runtime.frontend import body
from pdd_runtime.frontend.experiment import Experiment, told
from pdd_runtime.frontend.keys import OPERATOR
from pdd_runtime.frontend.siblings import Siblings
from pdd_runtime.frontend.visit import Visit
from pdd_runtime.observe.sketch import Sketch
from pdd_runtime.observe.tally import Seen, Tally
from pdd_runtime.pipeline.comparison import P90, Interval, more_failures, quantile_ratio
from pdd_runtime.plugins.routing import WorkerKey

CONFIDENCE = 0.995
"""Of each bound of an interval that is shown: together 99 %."""
TIMES = {"ttft": "time to first token", "tpot": "time per output token", "gap": "longest gap", "e2e": "whole answer"}
"""What is measured of an answer, in seconds."""
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
_ENOUGH = 100
"""Requests of all variants together of which each that has a weight should have had one."""


class Order(BaseModel):
    """What is to be done."""

    model_config = ConfigDict(extra="forbid", strict=True)

    do: Literal["promote", "abort", "resume"]
    variant: str | None = None
    """None: abort all but the control; resume all that were aborted, rolled back or promoted."""
    why: str = Field("", max_length=500)

    def names(self, experiment: Experiment) -> list[str]:
        """Of the variants it is about. Raises `RequestError`."""
        if self.variant is not None:
            return [self.variant]
        if self.do == "promote":
            raise RequestError("it is not said which variant is promoted", where="variant")
        if self.do == "resume":
            return list(experiment.standing)
        graph = experiment.graph
        return [
            name
            for name, weight in experiment.weights.items()
            if name != graph.control and (weight or graph.spec.variants[name].weight)
        ]


def add_variants(app: FastAPI, experiment: Experiment, siblings: Siblings) -> None:
    """The endpoints, of a graph with variants."""

    @app.get("/pdd/variants")
    async def variants() -> Response:
        """How requests are split, and what became of them."""
        return _json(standings(experiment, await siblings.seen(experiment), siblings.behind))

    @app.post("/pdd/variants")
    async def decide(request: Request) -> Response:
        """Promote, abort or resume; the answer comes when all frontends go by it."""
        order, visit = await body.read(request, Order), request.scope["pdd_visit"]
        await siblings.decide(experiment, order.do, order.names(experiment), _who(visit), order.why)
        return _json(standings(experiment, await siblings.seen(experiment), siblings.behind))


def standings(experiment: Experiment, seen: Mapping[str, Seen], behind: Sequence[WorkerKey] = ()) -> dict[str, Any]:
    """Times are seconds, shares are of 1; an interval is [low, estimate, high], at 99 %. `behind`: frontends that do
    not know yet what was decided."""
    spec, graph = experiment.graph.spec, experiment.graph
    rails = spec.experiment.guardrails
    return {
        "graph": graph.name,
        "control": graph.control,
        "sticky": list(spec.experiment.sticky),
        "guardrails": rails.model_dump(mode="json") if rails else None,
        "variants": [_variant(experiment, name, seen) for name in spec.variants],
        "notes": _notes(experiment, seen) + [_behind(experiment, key) for key in behind],
        "decisions": [msgspec.to_builtins(each) | {"told": told(each)} for each in experiment.decisions],
    }


def _variant(experiment: Experiment, name: str, seen: Mapping[str, Seen]) -> dict[str, Any]:
    graph = experiment.graph
    variant, decision = graph.spec.variants[name], experiment.standing.get(name)
    whole, control = seen[name].whole, seen[graph.control].whole
    compared = None
    if name != graph.control:
        compared = {"failed": _interval(more_failures(whole.whole(), control.whole(), CONFIDENCE))} | {
            f"{time}_p90": _interval(quantile_ratio(whole.sketches(time), control.sketches(time), P90, CONFIDENCE))
            for time in TIMES
        }
    return {
        "name": name,
        "weight": variant.weight,
        "share": experiment.share(name),
        "state": decision.kind if decision else "running",
        "why": told(decision) if decision else "",
        "pools": list(variant.pools or graph.spec.pools),
        "routing": (variant.routing or graph.spec.routing).plugin,
        "handoff": (variant.handoff or graph.spec.handoff).plugin,
        **_numbers(whole.whole()),
        "late": _numbers(seen[name].late.whole()),
        "against_control": compared,
    }


def _numbers(tally: Tally) -> dict[str, Any]:
    return {
        "requests": tally.requests,
        "failed": tally.failed,
        "elsewhere": tally.elsewhere,
        **{time: _times(getattr(tally, time)) for time in TIMES},
        "tokens": tally.tokens,
        "cached": tally.cached,
        "prompt_tokens": tally.prompt_tokens,
    }


def _times(sketch: Sketch) -> dict[str, float | int | None]:
    quantiles = {name: sketch.quantile(q) for name, q in _QUANTILES.items()}
    return {"count": sketch.count, "mean": sketch.mean, **quantiles}


def _interval(interval: Interval | None) -> list[float] | None:
    return list(interval) if interval else None


def _notes(experiment: Experiment, seen: Mapping[str, Seen]) -> list[str]:
    """What keeps the comparison from being one."""
    late = {name: each.late.whole().requests for name, each in seen.items()}
    total = sum(late.values())
    notes = []
    for name, weight in experiment.weights.items():
        if weight and total >= _ENOUGH and not late[name]:
            sticky = ", ".join(experiment.graph.spec.experiment.sticky) or "nothing"
            notes.append(
                f"{name} has had none of the last {total} requests, and {experiment.share(name):.0%} of the weight: "
                f"they are all alike in what the split goes by ({sticky})"
            )
    if not experiment.weights[experiment.graph.control]:
        notes.append("the control gets no requests, so nothing is compared with it, and no guardrail acts")
    return notes


def _behind(experiment: Experiment, key: WorkerKey) -> str:
    homes = experiment.graph.frontends
    where = f" in {homes[key.index]}" if key.index < len(homes) else ""
    return f"{key}{where} does not know yet all that was decided: discovery has not told it"


def _who(visit: Visit) -> str:
    return f"operator {visit.name}" if visit.name not in ("", OPERATOR) else "operator"


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
