"""What nodes, lines, energy and tokens cost: the numbers that a plan is priced by."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema

from pdd_runtime.graph.units import Bandwidth


class Range(NamedTuple):
    """A number that is known from here to there only. Ranges that are added or multiplied keep their ends."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    @property
    def exact(self) -> bool:
        return self.low == self.high

    def plus(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def times(self, factor: float) -> Range:
        """By a number that is not below 0."""
        return Range(self.low * factor, self.high * factor)

    def under(self, amount: float) -> Range:
        """`amount` divided by it: most where it is least."""
        return Range(amount / self.high, amount / self.low)


NOTHING = Range(0.0, 0.0)


def _range(value: Any) -> Any:
    if isinstance(value, Range):
        return value
    ends = value if isinstance(value, (list, tuple)) else (value, value)
    if len(ends) != 2 or not all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in ends):
        raise ValueError("it must be a number, or [LOW, HIGH]")
    low, high = (float(end) for end in ends)
    if not 0 <= low <= high < float("inf"):
        raise ValueError("it must be a number of 0 or more, or [LOW, HIGH] with LOW not above HIGH")
    return Range(low, high)


Price = Annotated[
    Range,
    BeforeValidator(_range),
    PlainSerializer(lambda value: value.low if value.exact else list(value), when_used="json"),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]}),
]
"""A number, or `[LOW, HIGH]` where offers differ: then costs, and what follows from them, are ranges as well."""


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class NodePrice(_Form):
    """One node: a host and the chips in it."""

    price: Price
    """An hour of it."""
    chips: int = Field(default=8, ge=1, le=1024)
    """Chips in it. Nodes are bought whole: a cluster's pools of one hardware share them."""
    power: float = Field(default=0.0, ge=0, le=1000)
    """Kilowatts it draws while it works."""


class LinePrice(_Form):
    """One leased line between clusters."""

    price: Price
    """An hour of it."""
    bandwidth: Annotated[Bandwidth, Field(gt=0)] = 1e10
    """What one carries; a link of more needs several."""


class Energy(_Form):
    """Electricity."""

    price: Price
    """A kilowatt-hour."""
    pue: float = Field(default=1.0, ge=1, le=5)
    """What the datacenter draws for each kilowatt of its nodes."""


class Tariff(_Form):
    """What users pay. A million tokens each."""

    input: Price = Range(1.0, 1.0)
    """Prompt tokens that had to be computed."""
    cached: float = Field(default=0.1, ge=0, le=1)
    """A cached prompt token's price, as a share of an uncached one's; services bill 0.10 to 0.25."""
    output: Price = NOTHING
    """Tokens of answers."""


def _node(value: Any) -> Any:
    return {"price": value} if isinstance(value, (int, float, list, tuple)) and not isinstance(value, bool) else value


class Prices(_Form):
    """All in one unit an hour, e.g. dollars, or nodes of one kind."""

    unit: str = Field(default="$/h", min_length=1, max_length=16)
    """What the numbers are, for reports."""
    nodes: dict[str, Annotated[NodePrice, BeforeValidator(_node)]] = {}
    """By hardware; a plain number is the price of a node of 8 chips."""
    line: Annotated[LinePrice, BeforeValidator(_node)] = LinePrice(price=NOTHING)
    """Lines between clusters; a plain number is the price of a line of 10 Gbit/s."""
    energy: Energy | None = None
    """None: it is in the nodes' prices."""
    tariff: Tariff = Tariff()
    """For revenue."""

    def node(self, hardware: str) -> NodePrice | None:
        """Of hardware by its name, in capitals or not."""
        named = {name.lower(): price for name, price in self.nodes.items()}
        return named.get(hardware.lower())
