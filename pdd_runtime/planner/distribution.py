"""Numbers that vary: `1000`, `uniform(500, 1500)`, `lognormal(800, 0.6)`."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

_CALL = re.compile(r"\s*([a-z]+)\s*\(([^()]*)\)\s*")
_FORMS = {
    "uniform": "uniform(LOW, HIGH)",
    "exponential": "exponential(MEAN)",
    "lognormal": "lognormal(MEDIAN, SIGMA)",
    "beta": "beta(A, B)",
    "choice": "choice(VALUE:WEIGHT, …)",
}
_FORMS_TEXT = f"a number, or one of {', '.join(_FORMS.values())}"


@dataclass(frozen=True)
class Distribution:
    """A number's distribution. In YAML and JSON a number (always that), or a text as `uniform(10, 20)`.

    `lognormal` has the median and the standard deviation of the logarithm; `choice` takes each value as often as
    its weight says, among the sum of all weights.
    """

    kind: str
    arguments: tuple[float, ...]
    """Of `choice`: value, weight, value, weight, …"""

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
            return Distribution._checked("fixed", (float(value),))
        if not isinstance(value, str):
            raise ValueError(f"it must be {_FORMS_TEXT}")
        call = _CALL.fullmatch(value)
        if call is None:
            return Distribution._checked("fixed", (_number(value, _FORMS_TEXT),))
        kind, inner = call[1], [part.strip() for part in call[2].split(",")]
        form = _FORMS.get(kind)
        if form is None:
            raise ValueError(f"no distribution is called {kind!r}: it must be {_FORMS_TEXT}")
        if kind == "choice":
            pairs = [part.split(":") for part in inner]
            if not all(len(pair) == 2 for pair in pairs):
                raise ValueError(f"write it as {form}")
            return Distribution._checked(kind, tuple(_number(text, form) for pair in pairs for text in pair))
        arguments = tuple(_number(text, form) for text in inner)
        if len(arguments) != form.count(",") + 1:
            raise ValueError(f"write it as {form}")
        return Distribution._checked(kind, arguments)

    @staticmethod
    def _checked(kind: str, arguments: tuple[float, ...]) -> Distribution:
        wrong = ""
        if not all(math.isfinite(number) for number in arguments):
            wrong = "every number must be finite"
        elif kind == "uniform" and arguments[0] > arguments[1]:
            wrong = "LOW must not be above HIGH"
        elif kind in ("exponential", "beta") and min(arguments) <= 0:
            wrong = "its numbers must be above 0"
        elif kind == "lognormal" and (arguments[0] <= 0 or arguments[1] < 0):
            wrong = "MEDIAN must be above 0, and SIGMA not below it"
        elif kind == "choice" and (min(arguments[1::2]) < 0 or sum(arguments[1::2]) <= 0):
            wrong = "weights must not be below 0, and one must be above it"
        if wrong:
            raise ValueError(f"{wrong} in {_FORMS.get(kind, 'it')}" if kind != "fixed" else wrong)
        return Distribution(kind, arguments)

    def sample(self, rng: random.Random) -> float:
        """The next number. One `rng` state gives one number, on every machine."""
        a = self.arguments
        draw: dict[str, Callable[[], float]] = {
            "fixed": lambda: a[0],
            "uniform": lambda: rng.uniform(a[0], a[1]),
            "exponential": lambda: rng.expovariate(1 / a[0]),
            "lognormal": lambda: rng.lognormvariate(math.log(a[0]), a[1]),
            "beta": lambda: rng.betavariate(a[0], a[1]),
            "choice": lambda: rng.choices(a[::2], a[1::2])[0],
        }
        return draw[self.kind]()

    @property
    def bounds(self) -> tuple[float, float]:
        """The least and the greatest number it can give."""
        if self.kind == "fixed":
            return self.arguments[0], self.arguments[0]
        if self.kind == "uniform":
            return self.arguments[0], self.arguments[1]
        if self.kind == "choice":
            values = [v for v, weight in zip(self.arguments[::2], self.arguments[1::2], strict=True) if weight]
            return min(values), max(values)
        return (0.0, 1.0) if self.kind == "beta" else (0.0, math.inf)

    def __str__(self) -> str:
        numbers = [f"{number:g}" for number in self.arguments]
        if self.kind == "fixed":
            return numbers[0]
        if self.kind == "choice":
            numbers = [f"{v}:{weight}" for v, weight in zip(numbers[::2], numbers[1::2], strict=True)]
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


def _number(text: str, form: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text.strip()!r} is not a number: it must be {form}") from None
