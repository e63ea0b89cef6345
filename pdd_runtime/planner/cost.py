"""What a deployment costs an hour, and what it gives for that: BCR, the report's benefit-cost ratio."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pdd_runtime.errors import PddError
from pdd_runtime.graph import Graph, nearest
from pdd_runtime.planner.figures import FigureError
from pdd_runtime.planner.hardware import counted
from pdd_runtime.planner.prices import NOTHING, Prices, Range

_ROUNDING = 1e-9
"""So much over a whole line needs no other."""


class PriceError(PddError):
    """Something has no price. `where` names it."""

    code = "price"


@dataclass(frozen=True)
class Inventory:
    """What is bought or rented."""

    nodes: Mapping[str, float]
    """Nodes by hardware."""
    lines: int = 0
    """Lines between clusters."""
    sent: Mapping[str, float] = field(default_factory=dict)
    """Bytes an hour over each link, where the graph prices what is sent."""


@dataclass(frozen=True)
class Cost:
    """An hour's cost by kind, in the prices' unit."""

    nodes: Range
    lines: Range = NOTHING
    energy: Range = NOTHING
    traffic: Range = NOTHING

    @property
    def total(self) -> Range:
        return self.nodes.plus(self.lines).plus(self.energy).plus(self.traffic)


def cost(inventory: Inventory, prices: Prices, traffic: Mapping[str, float] | None = None) -> Cost:
    """`traffic`: dollars a GB sent, by link. Raises `PriceError` for hardware without a price."""
    nodes, energy = NOTHING, NOTHING
    for hardware, count in inventory.nodes.items():
        price = prices.node(hardware)
        if price is None:
            known = ", ".join(prices.nodes) or "none"
            raise PriceError(
                f"{hardware} has no price",
                where="prices.nodes",
                why=f"the hardware with prices is: {known}",
                fix=f"add {hardware}: PRICE" + (f"; {near}" if (near := nearest(hardware, prices.nodes)) else ""),
            )
        nodes = nodes.plus(price.price.times(count))
        if prices.energy is not None:
            energy = energy.plus(prices.energy.price.times(count * price.power * prices.energy.pue))
    sent = sum(inventory.sent.get(link, 0.0) / 1e9 * price for link, price in (traffic or {}).items())
    return Cost(nodes, prices.line.price.times(inventory.lines), energy, Range(sent, sent))


def bcr(goodput: float, spent: Cost | Range) -> Range:
    """Requests a second for each unit spent an hour, `goodput / cost`. Where the price is a range, so is this: low is
    that at the high price. Raises `PriceError` where nothing is spent."""
    total = spent.total if isinstance(spent, Cost) else spent
    if total.low <= 0:
        raise PriceError("there is no BCR of what costs nothing", where="prices", fix="price the nodes")
    return total.under(goodput)


def inventory_of(graph: Graph, prices: Prices, sent: Mapping[str, float] | None = None) -> Inventory:
    """What a graph runs on: its pools' `hardware` (`32xH100`: the chips of each worker) as whole nodes by cluster and
    kind, and the lines its links are made of. Raises `PriceError` where a pool has no hardware."""
    chips: Counter[tuple[str, str]] = Counter()
    for name, pool in graph.spec.pools.items():
        if pool.hardware is None:
            raise PriceError(
                f'nothing says what pool "{name}" runs on',
                where=f"spec.pools.{name}",
                fix="add e.g. hardware: 8xH100, the chips of each of its workers",
            )
        try:
            count, hardware = counted(pool.hardware.lower())
        except FigureError as error:
            raise PriceError(error.what, where=f"spec.pools.{name}.hardware", why=error.why, fix=error.fix) from error
        chips[pool.cluster, hardware] += pool.replicas * count
    nodes: Counter[str] = Counter()
    for (_, hardware), count in chips.items():
        price = prices.node(hardware)
        nodes[hardware] += math.ceil(count / price.chips) if price else count
    used = {edge.link for edge in graph.spec.edges if edge.link is not None}
    lines = sum(lines_of(link.bandwidth, prices) for name, link in graph.spec.links.items() if name in used)
    return Inventory(dict(nodes), lines, sent or {})


def lines_of(bandwidth: float, prices: Prices) -> int:
    """How many leased lines carry `bandwidth` bit/s."""
    return math.ceil(bandwidth / prices.line.bandwidth - _ROUNDING)


def graph_cost(graph: Graph, prices: Prices, sent: Mapping[str, float] | None = None) -> Cost:
    """An hour of a graph; `sent`: bytes an hour by link, priced by the links' own `price`. Raises `PriceError`."""
    traffic = {name: link.price for name, link in graph.spec.links.items() if link.price is not None}
    return cost(inventory_of(graph, prices, sent), prices, traffic)
