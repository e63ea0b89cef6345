"""A plan's answer as one HTML file, with plots and nothing to fetch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from pdd_runtime.planner.plan_report import PlanReport, changed, pools, ranged, traits

_WIDTH, _HEIGHT = 560, 240
"""Pixels of a plot's area."""
_LEFT, _TOP = 60, 12
_TICKS = 5


@dataclass(frozen=True)
class Plot:
    """A line through points, in pixels."""

    title: str
    across: str
    up: str
    path: str
    marks: list[tuple[float, float, str, bool]]
    """x, y, a label, and whether it is the best."""
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    left: int = _LEFT
    top: int = _TOP
    width: int = _WIDTH
    height: int = _HEIGHT


def to_html(report: PlanReport) -> str:
    """The whole page."""
    environment = Environment(
        loader=PackageLoader("pdd_runtime.planner"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("plan.html.j2").render(
        report=report,
        plots=_plots(report),
        pools=pools,
        traits=traits,
        ranged=ranged,
        changed=changed,
        best=report.found.best,
        relay=report.found.relay,
    )


def _plots(report: PlanReport) -> list[Plot]:
    unit, found, hour = report.unit, report.found, report.bathtub
    front = [
        (each.cost.total.middle, each.goodput, f"{pools(each)}: {each.goodput:.3g} requests/s", each is found.best)
        for each in found.front
    ]
    plots = [plot("Worth their money", f"cost, {unit}", "goodput, requests/s", front)]
    if report.what_if is not None:
        falls = [
            (each.hits.get("main", 0.0) * 100, each.goodput, f"{each.goodput:.3g} requests/s", index == 0)
            for index, each in enumerate(report.what_if.falls)
        ]
        plots.append(plot("When hits fall", "prompt tokens cached at main, %", "goodput, requests/s", falls))
    title = "What a prefill worker earns an hour, by the hit rate of its prompts"
    earned = [(each.hit * 100, each.per_hour.middle, "", False) for each in hour if each.hit <= _MOST]
    plots.append(plot(title, "cached, %", "revenue an hour", earned))
    return plots


_MOST = 0.95
"""Beyond that hit rate revenue an hour is of another order, and would press the rest flat."""


def plot(title: str, across: str, up: str, points: Sequence[tuple[float, float, str, bool]]) -> Plot:
    """`points`: x, y, label (none: no mark), and whether it stands out."""
    points = sorted(points)
    x_place, x_ticks = _axis([point[0] for point in points], _LEFT, _WIDTH, zero=False)
    y_place, y_ticks = _axis([point[1] for point in points], _TOP + _HEIGHT, -_HEIGHT, zero=True)
    placed = [(x_place(x), y_place(y), label, best) for x, y, label, best in points]
    path = " ".join(f"{'L' if index else 'M'}{x},{y}" for index, (x, y, _, _) in enumerate(placed))
    marks = [each for each in placed if each[2]]
    return Plot(title, across, up, path, marks, x_ticks, y_ticks)


def _axis(
    values: Sequence[float], start: int, length: int, zero: bool
) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """Where a value is placed, and the ticks: round numbers around all values."""
    low, high = (0.0 if zero else min(values)), max(values)
    step = _step((high - low or abs(high) or 1.0) / _TICKS)
    first, last = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    span = (last - first) or step

    def place(value: float) -> float:
        return round(start + length * (value - first) / span, 1)

    return place, [(place(first + step * n), f"{first + step * n:.6g}") for n in range(round(span / step) + 1)]


def _step(rough: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= rough * 0.999)
