"""`cost`: what the deployments cost, and their BCR."""

from __future__ import annotations

from dataclasses import replace

from published import deployment, prices, published
from table import Table

from pdd_runtime.planner.cost import Cost, bcr, cost, inventory_of
from pdd_runtime.planner.prices import Range


def spent(name: str, lines: int | None = None) -> Cost:
    """An hour of it; `lines`: other than the graph has."""
    inventory = inventory_of(deployment(name), prices())
    if lines is not None:
        inventory = replace(inventory, lines=lines)
    return cost(inventory, prices())


def gain(better: Range, base: Range) -> Range:
    """Of BCRs; the base's is exact."""
    return Range(better.low / base.low - 1, better.high / base.low - 1)


def tables() -> list[Table]:
    figures = published()
    goodput = figures["goodput"]
    base = bcr(goodput["idc-pd"], spent("idc-pd"))
    rows = []
    for name, lines, label in (("idc-pd", None, "IDC-PD"), ("pdd", 1, "PDD"), ("pdd", 2, "PDD, both lines paid")):
        total, ratio = spent(name, lines).total, bcr(goodput[name], spent(name, lines))
        theirs = lines != 2
        rows.append([
            label,
            f"{goodput[name]:g}",
            _range(total, 2),
            _range(Range(*figures["cost"][name]), 2) if theirs else "–",
            _range(ratio, 4),
            _range(Range(*figures["bcr"][name]), 4) if theirs else "–",
            _gain(gain(ratio, base)) if name == "pdd" else "–",
            _gain(Range(*figures["bcr_gain"])) if lines == 1 else "–",
        ])  # fmt: skip
    columns = ["", "goodput, req/s", "cost, X", "report", "BCR", "report", "gain", "report"]
    note = "The goodputs are the report's. It has two lines of 10 Gbit/s in the setup, and one in the cost."
    return [Table("Cost and BCR", columns, rows, [note])]


def _range(value: Range, digits: int) -> str:
    ends = [f"{end:.{digits}f}" for end in value]
    return ends[0] if value.exact else "–".join(ends)


def _gain(value: Range) -> str:
    return f"+{value.low:.1%} to +{value.high:.1%}".replace("%", " %")
