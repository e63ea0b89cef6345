"""Numbers that vary: `1000`, `uniform(500, 1500)`, `choice(50:0.3, exponential(2000, 500):0.7)`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

_CALL = re.compile(r"\s*([a-z]+)\s*\((.*)\)\s*", re.DOTALL)
_FORMS = {
    "uniform": "uniform(LOW, HIGH)",
    "exponential": "exponential(MEAN[, LOW])",
    "lognormal": "lognormal(MEDIAN, SIGMA)",
    "beta": "beta(A, B[, LOW, HIGH])",
    "choice": "choice(VALUE:WEIGHT, …)",
}
_COUNTS = {"uniform": (2,), "exponential": (1, 2), "lognormal": (2,), "beta": (2, 4)}
"""How many numbers each takes."""
_FORMS_TEXT = f"a number, or one of {', '.join(_FORMS.values())}"
_DEEPEST = 4
"""Choices within choices."""


@dataclass(frozen=True)
class Distribution:
    """A number's distribution. In YAML and JSON a number (always that), or a text as `uniform(10, 20)`.

    `exponential` begins at LOW (0), `beta` lies between LOW and HIGH (0 and 1); `lognormal` has the median and the
    standard deviation of the logarithm; `choice` takes each value as often as its weight says, among the sum of all
    weights, and a value may be a distribution itself.
    """

    kind: str
    arguments: tuple[float, ...]
    """Of `choice`: the weights."""
    values: tuple[Distribution, ...] = ()
    """Of `choice`."""

    @staticmethod
    def fixed(value: float) -> Distribution:
        """Always `value`."""
        return Distribution("fixed", (float(value),))

    @staticmethod
    def parse(value: object) -> Distribution:
        """Raises `ValueError`, which says what would be right."""
        if isinstance(value, Distribution):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return _checked("fixed", (float(value),))
        if not isinstance(value, str):
            raise ValueError(f"it must be {_FORMS_TEXT}")
        return _parsed(value, _DEEPEST)

    def draw(self, rng: np.random.RandomState, count: int) -> NDArray[np.float64]:
        """The next `count` numbers. A `RandomState` gives the same ones in every version of numpy (NEP 19)."""
        a = self.arguments
        if self.kind == "fixed":
            return np.full(count, a[0])
        if self.kind == "uniform":
            return rng.uniform(a[0], a[1], count)
        if self.kind == "exponential":
            low = self.bounds[0]
            return low + rng.exponential(a[0] - low, count)
        if self.kind == "lognormal":
            return rng.lognormal(math.log(a[0]), a[1], count)
        if self.kind == "beta":
            low, high = self.bounds
            return low + (high - low) * rng.beta(a[0], a[1], count)
        ends = np.cumsum(a) / sum(a)
        which = np.minimum(np.searchsorted(ends, rng.random_sample(count), side="right"), len(a) - 1)
        drawn = np.empty(count)
        for number, value in enumerate(self.values):
            chosen = which == number
            drawn[chosen] = value.draw(rng, int(np.count_nonzero(chosen)))
        return drawn

    @property
    def mean(self) -> float:
        """What the numbers are on average."""
        a = self.arguments
        if self.kind == "uniform":
            return (a[0] + a[1]) / 2
        if self.kind == "lognormal":
            return a[0] * math.exp(a[1] ** 2 / 2)
        if self.kind == "beta":
            low, high = self.bounds
            return low + (high - low) * a[0] / (a[0] + a[1])
        if self.kind == "choice":
            return sum(value.mean * weight for value, weight in zip(self.values, a, strict=True)) / sum(a)
        return a[0]

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest number it can give."""
        a = self.arguments
        if self.kind == "fixed":
            return a[0], a[0]
        if self.kind == "uniform":
            return a[0], a[1]
        if self.kind == "choice":
            taken = [value.bounds for value, weight in zip(self.values, a, strict=True) if weight]
            return min(low for low, _ in taken), max(high for _, high in taken)
        if self.kind == "beta":
            return (a[2], a[3]) if len(a) == 4 else (0.0, 1.0)
        return a[1] if self.kind == "exponential" and len(a) == 2 else 0.0, math.inf

    def __str__(self) -> str:
        numbers = [f"{number:g}" for number in self.arguments]
        if self.kind == "fixed":
            return numbers[0]
        if self.kind == "choice":
            numbers = [f"{value}:{weight}" for value, weight in zip(self.values, numbers, strict=True)]
        return f"{self.kind}({', '.join(numbers)})"

    def to_json(self) -> float | int | str:
        """What `parse` reads back."""
        if self.kind != "fixed":
            return str(self)
        value = self.arguments[0]
        return int(value) if value.is_integer() else value

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls.parse, serialization=core_schema.plain_serializer_function_ser_schema(cls.to_json)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [{"type": "number"}, {"type": "string"}], "description": _FORMS_TEXT}


def split(text: str) -> list[str]:
    """What commas divide, but not those between brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _parsed(text: str, depth: int) -> Distribution:
    call = _CALL.fullmatch(text)
    if call is None:
        return _checked("fixed", (_number(text, _FORMS_TEXT),))
    kind, inner = call[1], split(call[2])
    form = _FORMS.get(kind)
    if form is None:
        raise ValueError(f"no distribution is called {kind!r}: it must be {_FORMS_TEXT}")
    if kind == "choice":
        if not depth:
            raise ValueError(f"choices stand within choices more than {_DEEPEST} deep")
        pairs = [part.rpartition(":") for part in inner]
        if not all(value for value, _, _ in pairs):
            raise ValueError(f"write it as {form}")
        values = tuple(_parsed(value, depth - 1) for value, _, _ in pairs)
        return _checked(kind, tuple(_number(weight, form) for _, _, weight in pairs), values)
    arguments = tuple(_number(text, form) for text in inner)
    if len(arguments) not in _COUNTS[kind]:
        raise ValueError(f"write it as {form}")
    return _checked(kind, arguments)


def _checked(kind: str, arguments: tuple[float, ...], values: tuple[Distribution, ...] = ()) -> Distribution:
    wrong, a = "", arguments
    if not all(math.isfinite(number) for number in a):
        wrong = "every number must be finite"
    elif (kind == "uniform" and a[0] > a[1]) or (kind == "beta" and len(a) == 4 and a[2] > a[3]):
        wrong = "LOW must not be above HIGH"
    elif kind in ("exponential", "beta") and min(a[:2] if kind == "beta" else a[:1]) <= 0:
        wrong = "its numbers must be above 0"
    elif kind == "exponential" and len(a) == 2 and not 0 <= a[1] < a[0]:
        wrong = "LOW must not be below 0, and MEAN above it"
    elif kind == "lognormal" and (a[0] <= 0 or a[1] < 0):
        wrong = "MEDIAN must be above 0, and SIGMA not below it"
    elif kind == "choice" and (min(a) < 0 or sum(a) <= 0):
        wrong = "weights must not be below 0, and one must be above it"
    if wrong:
        raise ValueError(f"{wrong} in {_FORMS[kind]}" if kind in _FORMS else wrong)
    return Distribution(kind, arguments, values)


def _number(text: str, form: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text.strip()!r} is not a number: it must be {form}") from None
