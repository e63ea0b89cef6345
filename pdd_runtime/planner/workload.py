"""What is asked of a graph: how many requests, how long, how alike, and when. The same for a bench and a simulation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

from msgspec.structs import replace
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from pdd_runtime.planner.arrivals import Arrivals
from pdd_runtime.planner.distribution import Distribution
from pdd_runtime.planner.generator import generate
from pdd_runtime.planner.session import Session
from pdd_runtime.planner.traces import Trace, replay

_VOCABULARY = re.compile(r"(\d+)-(\d+)")


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


_GENERATED = {"prompt", "output", "turns", "new", "think"}
_SHARED = {"hit", "prefixes"}
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

    trace: Annotated[Trace, BeforeValidator(Trace.parse)] | None = None
    """Replays recorded requests: `FORMAT:FILE`, or a mapping with `format`, `file` and what is to be changed of them.
    Lengths and sessions then are the trace's."""

    @model_validator(mode="after")
    def _consistent(self) -> Workload:
        if self.rate is not None and self.concurrency is not None:
            raise ValueError("rate (open loop) and concurrency (closed loop) exclude each other: leave one out")
        if said := sorted(self.model_fields_set & self._recorded):
            raise ValueError(f"the trace says {', '.join(said)} itself: leave it out")
        return self

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if key not in self._recorded}

    @property
    def _recorded(self) -> set[str]:
        """Keys that the trace answers."""
        if self.trace is None:
            return set()
        return _GENERATED | _SHARED if self.trace.has_content else _GENERATED

    @property
    def users(self) -> int:
        """Closed loop: how many sessions run at once. 0: open loop."""
        if self.rate is not None or (self.concurrency is None and self.trace is not None and self.trace.has_times):
            return 0
        return self.concurrency or 1

    @property
    def first_token(self) -> int:
        return int(self.vocabulary.partition("-")[0])

    @property
    def last_token(self) -> int:
        return int(self.vocabulary.partition("-")[2])

    def stream(self, seed: int, name: str = "") -> Iterator[Session]:
        """In the order of their start, made as they are taken; endless, but a trace's are those it has. Other names
        give other sessions of the same kind, e.g. for a warm-up. Raises `WorkloadError` where a trace is wrong."""
        return generate(self, seed, name) if self.trace is None else replay(self, self.trace, seed, name)

    def sessions(self, requests: int, seed: int, name: str = "") -> tuple[Session, ...]:
        """So many requests, or as many as a trace has: the first of the stream."""
        return tuple(first(self.stream(seed, name), requests))


def first(sessions: Iterator[Session], requests: int) -> Iterator[Session]:
    """The first so many requests; a session that has more of them is cut."""
    while requests > 0 and (session := next(sessions, None)) is not None:
        yield session if len(session.turns) <= requests else replace(session, turns=session.turns[:requests])
        requests -= len(session.turns)
