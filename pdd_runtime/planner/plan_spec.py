"""`kind: Plan`: what is looked for, among which graphs, at which prices."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from pdd_runtime.errors import GraphError, PddError
from pdd_runtime.graph import PluginRef
from pdd_runtime.graph.document import Document, read
from pdd_runtime.graph.faults import explain_all
from pdd_runtime.graph.models import Metadata, Name
from pdd_runtime.graph.overrides import apply
from pdd_runtime.graph.units import Bandwidth, Duration, UnitError
from pdd_runtime.planner.figures import FigureError
from pdd_runtime.planner.hardware import Hardware, counted
from pdd_runtime.planner.model_spec import ModelFigures
from pdd_runtime.planner.prices import Prices
from pdd_runtime.planner.simulate.scenario import LOCAL_RATE

_SPAN = re.compile(r"(\d{1,4})\s*\.\.\s*(\d{1,4})")
_MOST_CHOICES = 1025
_FORM = "docs/planner.md has an example and every key"


class PlanError(PddError):
    """A plan is wrong, or cannot be met. `where` is file:line:column, or the key."""

    code = "plan"


class PlanErrors(PlanError):
    """Several faults of one plan; `errors` has them all."""

    code = "plans"

    def __init__(self, errors: tuple[PlanError, ...]) -> None:
        self.errors = errors
        first = errors[0]
        super().__init__(first.what, where=first.where, why=first.why, fix=first.fix)


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _many(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else (value,)


def _counts(value: Any) -> Any:
    span = _SPAN.fullmatch(value.strip()) if isinstance(value, str) else None
    if span is not None:
        low, high = int(span[1]), int(span[2])
        if low > high:
            raise ValueError(f"{low} is more than {high}")
        return tuple(range(low, high + 1))
    if isinstance(value, str):
        raise ValueError("it must be a number, LOW..HIGH, or a list of numbers")
    return _many(value)


def _each_once(values: tuple[Any, ...]) -> tuple[Any, ...]:
    if not values:
        raise ValueError("it must not be empty")
    if any(value in values[:index] for index, value in enumerate(values)):
        raise ValueError("something stands twice in it")
    return values


def _chips(value: str) -> str:
    value = value.strip().lower()
    try:
        counted(value)
    except FigureError as error:
        raise UnitError(error.what, error.fix) from error
    return value


Counts = Annotated[
    tuple[Annotated[int, Field(ge=0, le=1024)], ...],
    Field(max_length=_MOST_CHOICES),
    BeforeValidator(_counts),
    AfterValidator(_each_once),
]
"""`8`, `4..16`, or `[4, 8, 16]`."""


class Kind(_Form):
    """What a pool's workers may run on."""

    hardware: Annotated[str, AfterValidator(_chips)]
    """The chips of each worker, e.g. `8xH100`: other numbers are other degrees of parallelism."""
    config: dict[str, Any] = {}
    """Settings of the engine that go with them. `tp` follows the chips by itself where it did in the graph."""
    profile: Name | None = None
    """The pool of the profile that behaves as workers on these chips do; by default the one of the pool's own name."""


def _kinds(value: Any) -> Any:
    return tuple({"hardware": each} if isinstance(each, str) else each for each in _many(value))


class PoolChoice(_Form):
    """What may vary of a pool of the graph."""

    replicas: Counts | None = None
    """How many workers: `8`, `4..16`, `[4, 8, 16]`. 0: without the pool, and its edges. By default the graph's."""
    hardware: Annotated[tuple[Kind, ...], BeforeValidator(_kinds), AfterValidator(_each_once)] | None = None
    """On which chips: `8xH100`, or a list. By default the graph's."""


class LinkChoice(_Form):
    """What may vary of a link of the graph, and what one connection over it gets."""

    bandwidth: (
        Annotated[tuple[Annotated[Bandwidth, Field(gt=0)], ...], BeforeValidator(_many), AfterValidator(_each_once)]
        | None
    ) = None
    """How fast: `10Gbit/s`, or a list. By default the graph's."""
    flow_rate: Annotated[Bandwidth, Field(gt=0)] | None = None
    """What one connection gets at most; none: all of the link."""


def _plugins(value: Any) -> Any:
    return tuple({"plugin": each} if isinstance(each, str) else each for each in _many(value))


Plugins = Annotated[tuple[PluginRef, ...], BeforeValidator(_plugins), AfterValidator(_each_once)]
"""A plugin's name, `{plugin: …, config: …}`, or a list of these."""


class PlanSlo(_Form):
    """What users are promised; by default what the graph says."""

    ttft_p90: Annotated[Duration, Field(gt=0)] | None = None
    """Time to the first token, 90th percentile."""
    tpot_p90: Annotated[Duration, Field(gt=0)] | None = None
    """Time per output token after it, 90th percentile."""
    decoded: bool = False
    """Count from the first token that relay or main makes, the second one: prefill's own, which is sent at once, proves
    little. Else a wait between the two is in the time per token."""


class Effort(_Form):
    """How long single simulations are."""

    span: Annotated[Duration, Field(gt=0)] = 150.0
    """Simulated time of a test whether a deployment holds at a rate, behind that in which batches fill. A queue that
    grows must have time to show."""
    requests: int = Field(default=1000, ge=100, le=10_000_000)
    """Requests of such a test at least."""
    final: int = Field(default=1, ge=1, le=1000)
    """So many times longer are those of the deployments that are shown."""
    seeds: int = Field(default=4, ge=2, le=100)
    """Of the best deployment, two of the others that are shown: none of them is the search's own."""


class PlanBody(_Form):
    """What is looked for."""

    graph: str = Field(min_length=1)
    """The graph that is varied, a file; paths are relative to the plan's. Its pools say their `hardware`."""
    set: tuple[str, ...] = ()
    """Changes to it first, `PATH=VALUE`."""
    workload: str = "report"
    """What is asked: a workload's name or file, or a short text as for `bench`. Its rate is not used."""
    profile: str | None = None
    """What `pdd-runtime profile` measured of the graph, a file; where it has nothing of a pool, the figures of its
    hardware and model are used."""
    hardware: dict[str, Hardware] = {}
    """Chips beside those that are known, by name: their four figures, or `like: NAME` and what differs."""
    models: dict[str, ModelFigures] = {}
    """Models beside those that are known, by the name that the graph has for them."""
    latency: dict[str, Any] = {}
    """Settings of the latency model `roofline`: which share of the figures is reached."""
    prices: Prices
    """What things cost."""
    slo: PlanSlo = PlanSlo()
    """What users are promised."""
    goodput: float | None = Field(default=None, gt=0, le=1e6, allow_inf_nan=False)
    """Requests a second within the SLO that are needed: the cheapest deployment that serves them is best."""
    budget: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """What may be spent an hour, at the middle of prices: the most goodput for it is best. With neither: the best
    BCR."""
    pools: dict[Name, PoolChoice] = {}
    """What may vary, by pool."""
    links: dict[Name, LinkChoice] = {}
    """What may vary, by link."""
    local_rate: Annotated[Bandwidth, Field(gt=0)] = LOCAL_RATE * 8
    """How fast one transfer of KV is inside a cluster, from prefill to relay: a relay can hide only what is slower."""
    routing: Plugins | None = None
    """Routing policies to try; by default the graph's."""
    handoff: Plugins | None = None
    """Handoff strategies to try; by default the graph's."""
    effort: Effort = Effort()
    """How exactly."""

    @model_validator(mode="after")
    def _one_goal(self) -> PlanBody:
        if self.goodput is not None and self.budget is not None:
            raise ValueError("goodput and budget exclude each other: leave one out")
        return self


class Plan(_Form):
    """The whole plan."""

    apiVersion: Literal["pdd/v1alpha1"]  # noqa: N815 - the YAML's key
    """The form's version."""
    kind: Literal["Plan"]
    """What the file declares."""
    metadata: Metadata
    """What it is called; so is the graph that comes out."""
    spec: PlanBody
    """What is looked for."""


def read_plan(path: str | Path, overrides: Sequence[str] = ()) -> tuple[Plan, Document]:
    """The plan in a YAML file, changed by `overrides` (`spec.budget=80`), and where everything stood. Raises
    `PlanError`, or `PlanErrors`, with file:line:column."""
    try:
        document = read(Path(path))
        for override in overrides:
            apply(document, override)
        return Plan.model_validate_json(json.dumps(document.data)), document
    except GraphError as error:
        raise _ours(error) from error
    except ValidationError as error:
        faults = explain_all(error.errors(include_url=False), Plan, document)
        if isinstance(document.data, dict) and document.data.get("kind") == "InferenceGraph":
            fault = next(fault for fault in faults if fault.what.startswith("kind is"))
            fix = f"write a plan that names it, graph: {Path(path).name}; {_FORM}"
            raise PlanError(fault.what, where=fault.where, why=f"{fault.why}: this is a graph", fix=fix) from error
    errors = tuple(_ours(fault) for fault in faults)
    raise errors[0] if len(errors) == 1 else PlanErrors(errors)


def _ours(error: GraphError) -> PlanError:
    """Said of a graph, meant of a plan."""
    what = error.what.replace("the graph", "the plan").replace("for a graph", "for a plan")
    fix = _FORM if "docs/graph.md" in error.fix else error.fix.replace("a graph's", "a plan's")
    return PlanError(what, where=error.where, why=error.why, fix=fix)
