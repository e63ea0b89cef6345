"""When sessions begin: `poisson`, `fixed`, `gamma(3)`, `bursty(5, 10, 60)`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

_CALL = re.compile(r"\s*([a-z]+)\s*(?:\(([^()]*)\))?\s*")
_FORMS = {"poisson": "poisson", "fixed": "fixed", "gamma": "gamma(CV)", "bursty": "bursty(FACTOR, BUSY, CALM)"}
_COUNTS = {"poisson": 0, "fixed": 0, "gamma": 1, "bursty": 3}
_FORMS_TEXT = f"one of {', '.join(_FORMS.values())}"
_BATCH = 1024


@dataclass(frozen=True)
class Arrivals:
    """A point process of a given mean rate.

    `gamma` has gaps of that coefficient of variation: 0 is `fixed`, 1 is `poisson`, more comes in clumps. `bursty` is
    a Poisson process whose rate is FACTOR times higher in busy phases than in calm ones; phases last BUSY and CALM
    seconds on average, exponentially (a Markov-modulated Poisson process).
    """

    kind: str = "poisson"
    arguments: tuple[float, ...] = ()

    @staticmethod
    def parse(value: object) -> Arrivals:
        """Raises `ValueError`, which says what would be right."""
        if isinstance(value, Arrivals):
            return value
        call = _CALL.fullmatch(value) if isinstance(value, str) else None
        if call is None or call[1] not in _FORMS:
            raise ValueError(f"it must be {_FORMS_TEXT}")
        try:
            numbers = tuple(float(part) for part in call[2].split(",")) if call[2] else ()
        except ValueError:
            raise ValueError(f"write it as {_FORMS[call[1]]}, with numbers") from None
        if len(numbers) != _COUNTS[call[1]]:
            raise ValueError(f"write it as {_FORMS[call[1]]}")
        if not all(0 < number < np.inf for number in numbers):
            raise ValueError(f"its numbers must be above 0 in {_FORMS[call[1]]}")
        return Arrivals(call[1], numbers)

    def starts(self, rate: float, rng: np.random.RandomState) -> Iterator[float]:
        """Endless, ascending, in seconds; `rate` a second on average. But for `bursty`, whose phases are in seconds,
        another rate stretches the same times."""
        if self.kind == "bursty":
            yield from self._bursts(rate, rng)
            return
        at = 0.0
        while True:
            if self.kind == "fixed":
                gaps = np.ones(_BATCH)
            elif self.kind == "gamma":
                shape = self.arguments[0] ** -2
                gaps = rng.gamma(shape, 1 / shape, _BATCH)
            else:
                gaps = rng.exponential(1.0, _BATCH)
            times = at + np.cumsum(gaps)
            at = float(times[-1])
            yield from (times / rate).tolist()

    def _bursts(self, rate: float, rng: np.random.RandomState) -> Iterator[float]:
        factor, busy, calm = self.arguments
        slow = rate * (busy + calm) / (factor * busy + calm)
        rates, means = (slow, factor * slow), (calm, busy)
        at = 0.0
        phase = int(rng.random_sample() < busy / (busy + calm))
        while True:
            until = at + rng.exponential(means[phase])
            # Gaps of a Poisson process have no memory, so each phase begins anew.
            while (at := at + rng.exponential(1 / rates[phase])) < until:
                yield at
            at, phase = until, 1 - phase

    def __str__(self) -> str:
        return self.kind + (f"({', '.join(f'{number:g}' for number in self.arguments)})" if self.arguments else "")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"type": "string", "description": _FORMS_TEXT}
