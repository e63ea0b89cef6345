"""What a graph gives under a promise, and what that costs: goodput, cost and BCR."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from pdd_runtime.errors import PddError
from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.graph import Graph
from pdd_runtime.graph.document import read
from pdd_runtime.graph.faults import explain_all
from pdd_runtime.graph.units import Duration
from pdd_runtime.planner.cost import bcr, graph_cost
from pdd_runtime.planner.plan_spec import read_plan
from pdd_runtime.planner.prices import Prices

_DURATION = TypeAdapter(Annotated[Duration, Field(gt=0)])
_HOUR = 3600


class WorthError(PddError):
    """A promise or a price cannot be read."""

    code = "worth"


@dataclass(frozen=True)
class Promise:
    """A request is good that keeps it. Seconds; None: anything is."""

    ttft: float | None = None
    tpot: float | None = None

    @classmethod
    def parse(cls, text: str) -> Promise:
        """`ttft=10s,tpot=50ms`. Raises `WorthError`."""
        values: dict[str, float] = {}
        for part in text.split(","):
            key, _, value = (word.strip() for word in part.partition("="))
            try:
                if key not in ("ttft", "tpot"):
                    raise ValueError
                values[key] = _DURATION.validate_python(value)
            except ValueError as error:
                raise WorthError(f'"{part.strip()}" is no promise', where="--slo", fix="ttft=10s,tpot=50ms") from error
        return cls(**values)

    @classmethod
    def of(cls, graph: Graph | None) -> Promise:
        """A graph's own, taken request by request: its `slo` is of the 90th percentile."""
        return cls() if graph is None else cls(graph.spec.slo.ttft_p90, graph.spec.slo.tpot_p90)

    def kept(self, outcome: Outcome) -> bool:
        """An answer of one token has no time between tokens."""
        if outcome.error is not None:
            return False
        limits = ((self.ttft, outcome.metric("ttft")), (self.tpot, outcome.metric("tpot")))
        return all(limit is None or value is None or value <= limit for limit, value in limits)


class Worth(BaseModel):
    """Of one graph. None: there is no promise, or no price."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    good: int | None
    """Requests that kept the promise."""
    goodput: float | None
    """Of them, a second that requests were under way, at the load there was. It is no limit: `plan` looks for that."""
    cost: tuple[float, float] | None
    """An hour, from and to, where prices are ranges."""
    unit: str | None
    """Of the cost."""
    bcr: tuple[float, float] | None
    """Goodput over cost."""


def worth(
    outcomes: Sequence[Outcome],
    seconds: float,
    promise: Promise,
    graph: Graph | None = None,
    prices: Prices | None = None,
    link_bytes: Mapping[str, int] | None = None,
) -> Worth:
    """`seconds` is how long `outcomes` were under way; `link_bytes` were sent meanwhile. Raises `PriceError`."""
    known = promise != Promise() and seconds > 0
    good = sum(map(promise.kept, outcomes)) if known else None
    goodput = None if good is None else good / seconds
    if prices is None or graph is None or not seconds:
        return Worth(good=good, goodput=goodput, cost=None, unit=None, bcr=None)
    sent = {link: count / seconds * _HOUR for link, count in (link_bytes or {}).items()}
    total = graph_cost(graph, prices, sent).total
    gained = bcr(goodput, total) if goodput is not None and total.low > 0 else None
    return Worth(good=good, goodput=goodput, cost=tuple(total), unit=prices.unit, bcr=gained and tuple(gained))


def read_prices(path: Path) -> Prices:
    """Those of a YAML file: a plan's, or such a mapping alone. Raises `PddError`."""
    document = read(path)
    data: Any = document.data
    if isinstance(data, Mapping) and data.get("kind") == "Plan":
        return read_plan(path)[0].spec.prices
    try:
        return Prices.model_validate_json(json.dumps(data))
    except ValidationError as error:
        first = explain_all(error.errors(include_url=False), Prices, document)[0]
    what = first.what.replace("the graph", "the prices")
    raise WorthError(what, where=first.where, why=first.why, fix="docs/planner.md tells how prices are written")
