"""The report as one HTML file, with a chart for each metric and nothing to fetch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from pdd_runtime.experiments.outcome import METRICS
from pdd_runtime.experiments.report import Report

_SHOWN = ("p50", "p90", "p99")
_WIDTH, _RIGHT = 560, 110
"""Pixels: of the axis, and behind it."""
_LETTER, _NARROW, _WIDE = 8, 80, 320
"""Of a letter of a graph's name, and the least and the most for the whole name."""
_ROW, _HEAD, _FOOT = 18, 8, 26
_TICKS = 5


class Mark(NamedTuple):
    """One statistic of one graph, placed on the chart: pixels from its left and top."""

    statistic: str
    x: float
    y: float
    low: float
    high: float
    """Ends of the confidence interval."""
    label: str


class Chart(NamedTuple):
    """A metric's chart: a row for each graph and statistic."""

    metric: str
    title: str
    width: int
    height: int
    left: int
    names: list[tuple[float, str]]
    marks: list[Mark]
    ticks: list[tuple[float, str]]


def to_html(report: Report) -> str:
    """The whole page."""
    charts = [chart for metric in METRICS if (chart := _chart(report, metric)) is not None]
    return template("bench.html.j2").render(
        report=report, charts=charts, metrics=METRICS, seconds=seconds, bytes=size, share=share
    )


def template(name: str) -> Template:
    """One of the package's own."""
    environment = Environment(
        loader=PackageLoader("pdd_runtime.experiments"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def seconds(value: float | None) -> str:
    """`0.0123` as `12.3 ms`."""
    if value is None:
        return "–"
    return f"{value:.2f} s" if abs(value) >= 1 else f"{value * 1e3:.{1 if abs(value) < 0.1 else 0}f} ms"


def size(value: float) -> str:
    """`46_100_000` as `46.1 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def share(part: float, whole: float) -> str:
    """`1, 3` as `33.3 %`."""
    return f"{100 * part / whole:.1f} %" if whole else "–"


def _chart(report: Report, metric: str) -> Chart | None:
    """None: no graph has the metric."""
    rows: list[tuple[str, str, float, tuple[float, float]]] = []
    for name, graph in report.graphs.items():
        for statistic in _SHOWN:
            value: float | None = getattr(getattr(graph, metric), statistic)
            if value is not None:
                rows.append((name, statistic, value, report.ci.graphs[name][metric][statistic] or (value, value)))
    if not rows:
        return None
    top = max(max(value, high) for _, _, value, (_, high) in rows)
    width = step(top / _TICKS)
    end = width * max(1, math.ceil(top / width)) if width else 1.0

    left = min(_WIDE, max(_NARROW, 20 + _LETTER * max(len(name) for name in report.graphs)))

    def place(value: float) -> float:
        return round(left + _WIDTH * value / end, 1)

    names: list[tuple[float, str]] = []
    marks: list[Mark] = []
    y = float(_HEAD)
    before: Any = None
    for name, statistic, value, (low, high) in rows:
        if name != before:
            y += _ROW / 2
            names.append((y + _ROW * 1.5, name))
        before = name
        marks.append(
            Mark(statistic, place(value), y + _ROW / 2, place(low), place(high), f"{statistic} {seconds(value)}")
        )
        y += _ROW
    ticks = (
        [(place(width * n), seconds(width * n) if n else "0") for n in range(round(end / width) + 1)] if width else []
    )
    return Chart(metric, METRICS[metric], left + _WIDTH + _RIGHT, round(y) + _FOOT, left, names, marks, ticks)


def step(rough: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    if rough <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(rough))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999))
