"""What is asked of a graph: how many requests, how long, how alike, and when. The same for a bench and a simulation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from pdd_runtime.errors import PddError
from pdd_runtime.graph import nearest
from pdd_runtime.graph.document import Document, parse
from pdd_runtime.planner.arrivals import Arrivals
from pdd_runtime.planner.distribution import Distribution, split
from pdd_runtime.planner.generator import generate
from pdd_runtime.planner.session import Session

_LARGEST = 1 << 20
"""Bytes of a workload file."""
_VOCABULARY = re.compile(r"(\d+)-(\d+)")


class WorkloadError(PddError):
    """A workload is wrong. `where` is file:line:column, or the key."""

    code = "workload"


def _at_least(least: float) -> AfterValidator:
    def check(value: Distribution) -> Distribution:
        for part in value.values:
            check(part)
        if value.bounds[1] < least or (value.kind in ("fixed", "uniform") and value.bounds[0] < least):
            raise ValueError(f"it must not be below {least:g}")
        return value

    return AfterValidator(check)


def _share(value: Distribution) -> Distribution:
    low, high = value.bounds
    if low < 0 or high > 1:
        raise ValueError("it must lie between 0 and 1")
    return value


def _vocabulary(value: str) -> str:
    match = _VOCABULARY.fullmatch(value)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError("write it as FIRST-LAST, two token ids")
    return value


Tokens = Annotated[Distribution, _at_least(1)]
"""A number of tokens; rounded, at least 1."""


class Workload(BaseModel):
    """Random, but the same for the same seed, whatever it is sent to."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    prompt: Tokens = Distribution.fixed(1000)
    """Tokens of a prompt, those of its history included."""
    output: Tokens = Distribution.fixed(100)
    """Tokens of an answer. End tokens are ignored, so that it gets this long."""
    hit: Annotated[Distribution, AfterValidator(_share)] = Distribution.fixed(0)
    """Share of a prompt that an earlier request had as well, 0 to 1: in a session's first turn the beginning of a
    prefix that sessions share, in later turns the beginning of the session's own history."""
    turns: Tokens = Distribution.fixed(1)
    """Requests of a session, one after the other."""
    new: Tokens | None = None
    """Makes sessions conversations: a later turn's prompt is all that was said before and this many new tokens;
    `prompt` and `hit` then are of first turns."""
    think: Annotated[Distribution, _at_least(0)] = Distribution.fixed(0)
    """Seconds between the end of a turn and the next."""
    prefixes: int = Field(default=1, ge=1, le=10_000)
    """How many different prefixes sessions share; each begins with one of them by chance."""
    rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Open loop: requests a second on average. Sessions begin as `arrivals` says, however long the answers take."""
    arrivals: Arrivals = Arrivals()
    """How sessions begin in an open loop: `poisson`, `fixed` (equal gaps), `gamma(CV)` (gaps that vary more, or less,
    than Poisson's, whose coefficient of variation is 1), or `bursty(FACTOR, BUSY, CALM)` (a Poisson process whose rate
    is FACTOR times higher in phases of about BUSY seconds than in those of CALM seconds between)."""
    concurrency: int | None = Field(default=None, ge=1, le=100_000)
    """Closed loop (1, where there is no `rate` either): so many sessions run, and each that ends makes room for the
    next."""
    warmup: int = Field(default=2, ge=0, le=10_000)
    """Requests before the measurement, one after the other; not counted. The shared prefixes go before them."""
    timeout: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds after which a request counts as an error."""
    vocabulary: Annotated[str, AfterValidator(_vocabulary)] = "35-93"
    """Prompts are random token ids of this range, the ends included. The default are plain characters of about any
    tokenizer."""

    @model_validator(mode="after")
    def _one_loop(self) -> Workload:
        if self.rate is not None and self.concurrency is not None:
            raise ValueError("rate (open loop) and concurrency (closed loop) exclude each other: leave one out")
        return self

    @property
    def first_token(self) -> int:
        return int(self.vocabulary.partition("-")[0])

    @property
    def last_token(self) -> int:
        return int(self.vocabulary.partition("-")[2])

    def stream(self, seed: int, name: str = "") -> Iterator[Session]:
        """Endless, in the order of their start, made as they are taken. Other names give other sessions of the same
        kind, e.g. for a warm-up."""
        return generate(self, seed, name)

    def sessions(self, requests: int, seed: int, name: str = "") -> tuple[Session, ...]:
        """So many requests: the first of the stream."""
        return tuple(first(self.stream(seed, name), requests))


def first(sessions: Iterator[Session], requests: int) -> Iterator[Session]:
    """The first so many requests; a session that has more of them is cut."""
    while requests > 0 and (session := next(sessions, None)) is not None:
        yield session if len(session.turns) <= requests else session._replace(turns=session.turns[:requests])
        requests -= len(session.turns)


def read_workload(spec: str) -> Workload:
    """The workload in a YAML or JSON file, or in a short text as `prompt=1000,output=100,rate=0.5`. Raises
    `WorkloadError`."""
    path = Path(spec)
    if "=" in spec and not path.exists():
        return _built(_short(spec), None)
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise WorkloadError(
            "the workload cannot be read",
            where=spec,
            why=getattr(error, "strerror", None) or str(error),
            fix="name a YAML or JSON file, or write it as prompt=1000,output=100,rate=0.5",
        ) from error
    if not text.strip():
        raise WorkloadError("the workload is empty", where=spec, fix="docs/bench.md has its keys")
    try:
        document = parse(text, spec)
    except PddError as error:
        what = error.what.replace("the graph is", "the workload is")
        raise WorkloadError(what, where=error.where, why=error.why, fix="docs/bench.md has an example") from error
    return _built(document.data, document)


def _short(spec: str) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for part in split(spec):
        key, equals, value = (text.strip() for text in part.partition("="))
        if not (key and equals and value):
            raise WorkloadError(f'"{part.strip()}" is no KEY=VALUE', where="--workload", fix="write e.g. prompt=1000")
        if key in data:
            raise WorkloadError(f'"{key}" stands twice', where="--workload", fix="keep one of them")
        data[key] = value
    return data


def _built(data: Mapping[str, Any], document: Document | None) -> Workload:
    try:
        return Workload.model_validate(dict(data))
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
    key = str(fault["loc"][0]) if fault["loc"] else ""
    reason = fault.get("ctx", {}).get("error")
    why = str(reason) if reason else str(fault["msg"]).replace("Input should", "it should")
    if fault["type"] == "extra_forbidden":
        raise WorkloadError(
            f'unknown key "{key}" in the workload',
            where=document.locate_key((key,)) if document else "--workload",
            why=f"the keys are {', '.join(Workload.model_fields)}",
            fix=nearest(key, Workload.model_fields) or "remove it",
        )
    raise WorkloadError(
        f"{key} is {fault['input']!r}" if key else "the workload contradicts itself",
        where=document.locate((key,) if key else ()) if document else "--workload",
        why=why,
    )
