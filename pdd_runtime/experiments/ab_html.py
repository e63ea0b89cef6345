"""The report of an A/B test as one HTML file: verdicts, distributions, and how it went over time."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, isfinite
from typing import NamedTuple

from pdd_runtime.experiments.ab import Result
from pdd_runtime.experiments.ab_report import AbReport
from pdd_runtime.experiments.html import seconds, share, step, template
from pdd_runtime.experiments.outcome import METRICS
from pdd_runtime.experiments.report import Measured

_WIDTH, _HEIGHT = 420, 200
_LEFT, _TOP, _FOOT = 64, 8, 24
_TICKS = 4
_MOST = 400
"""Points of a line: more cannot be seen."""
_BEYOND = 1.05
"""A chart ends a little behind the largest 99th percentile: one outlier would flatten all else."""


class Axis(NamedTuple):
    """Ticks and their labels, pixels from the left or the top."""

    ticks: list[tuple[float, str]]


class Plot(NamedTuple):
    """One chart: a line or points for each graph."""

    title: str
    width: int
    height: int
    left: int
    bottom: int
    x: Axis
    y: Axis
    lines: list[tuple[int, str]]
    """Which graph, and its path."""
    points: list[tuple[int, float, float]]


class Bar(NamedTuple):
    """A question's interval, as pixels on a common scale."""

    y: int
    question: str
    low: float
    high: float
    at: float
    label: str
    verdict: str


class Forest(NamedTuple):
    """All questions about one graph."""

    name: str
    width: int
    height: int
    bars: list[Bar]
    ticks: list[tuple[float, str]]
    zero: float
    low: float
    high: float
    """The ends of what does not matter."""


def ab_html(report: AbReport, result: Result) -> str:
    """The whole page."""
    metrics = [metric for metric in METRICS if any(one.values(metric) for one in result.measured)]
    return template("ab.html.j2").render(
        report=report,
        names=list(report.graphs),
        forests=[_forest(report, name) for name in report.comparisons],
        charts=[(metric, METRICS[metric], *_charts(metric, result.measured)) for metric in metrics],
        seconds=seconds,
        share=share,
    )


def _charts(metric: str, measured: Sequence[Measured]) -> tuple[Plot, Plot]:
    """Its distribution, and its values over time."""
    values = [sorted(one.values(metric).values()) for one in measured]
    top = max(series[min(len(series) - 1, int(0.99 * len(series)))] for series in values if series) * _BEYOND
    end, x = _axis(top, _WIDTH, seconds)
    bottom = _TOP + _HEIGHT
    y = [(bottom - _HEIGHT * part, f"{part:.0%}") for part in (0.0, 0.5, 0.9, 1.0)]
    lines = [(number, _steps(series, end)) for number, series in enumerate(values) if series]
    distribution = Plot("share of requests within", *_size(), Axis(x), Axis(y), lines, [])
    begun = min(outcome.due for one in measured for outcome in one.outcomes)
    last = max(outcome.due for one in measured for outcome in one.outcomes) - begun
    span, times = _axis(last, _WIDTH, lambda at: f"{at:.0f} s" if at < 600 else f"{at / 60:.0f} min")
    rise, up = _axis(top, _HEIGHT, seconds)
    points = [
        (
            number,
            round(_LEFT + _WIDTH * (outcome.due - begun) / span, 1),
            round(bottom - _HEIGHT * min(1, value / rise), 1),
        )
        for number, one in enumerate(measured)
        for outcome in one.outcomes
        if (value := outcome.metric(metric)) is not None
    ]
    ticks = [(round(bottom - (at - _LEFT), 1), label) for at, label in up]
    return distribution, Plot("over the time of the test", *_size(), Axis(times), Axis(ticks), [], points)


def _size() -> tuple[int, int, int, int]:
    return _LEFT + _WIDTH + 30, _TOP + _HEIGHT + _FOOT, _LEFT, _TOP + _HEIGHT


def _axis(top: float, length: int, label: object) -> tuple[float, list[tuple[float, str]]]:
    """Where it ends, and its ticks."""
    assert callable(label)
    width = step(top / _TICKS)
    end = width * max(1, ceil(top / width - 1e-9)) if width else 1.0
    count = round(end / width) if width else 0
    return end, [(round(_LEFT + length * n * width / end, 1), label(n * width) if n else "0") for n in range(count + 1)]


def _steps(values: Sequence[float], end: float) -> str:
    """An SVG path that goes up by a share at each value."""
    bottom, count = _TOP + _HEIGHT, len(values)
    shown = range(0, count, max(1, count // _MOST))
    path = [f"M{_LEFT} {bottom}"]
    for number in shown:
        if values[number] > end:
            break
        path += [f"H{_LEFT + _WIDTH * values[number] / end:.1f}", f"V{bottom - _HEIGHT * (number + 1) / count:.1f}"]
    return "".join([*path, f"H{_LEFT + _WIDTH}"])


def _forest(report: AbReport, name: str) -> Forest:
    """In per cent of the baseline; what reaches beyond the scale is cut."""
    left, width, row = 140, 420, 24
    answers = report.comparisons[name].answers
    effect = report.minimum_effect
    reach = max([abs(answer.ratio - 1) for answer in answers.values() if answer.ratio is not None] + [2 * effect, 0.02])
    wide = 1.5 * reach

    def place(ratio: float) -> float:
        return round(left + width * (min(max(ratio - 1, -wide), wide) + wide) / (2 * wide), 1)

    bars = []
    for number, (question, answer) in enumerate(answers.items()):
        if answer.ratio is None:
            continue
        low, high = (
            end if end is not None and isfinite(end) else edge
            for end, edge in zip(answer.ratio_interval, (0, 9), strict=True)
        )
        label = f"{100 * (answer.ratio - 1):+.1f} %, {answer.verdict.value}"
        bars.append(
            Bar(number * row + 16, question, place(low), place(high), place(answer.ratio), label, answer.verdict.name)
        )
    width_of_tick = step(wide / 2)
    ticks = [
        (place(1 + n * width_of_tick), f"{100 * n * width_of_tick:+.3g} %" if n else "0")
        for n in range(-int(wide / width_of_tick), int(wide / width_of_tick) + 1)
    ]
    height = len(answers) * row + 30
    return Forest(name, left + width + 200, height, bars, ticks, place(1), place(1 / (1 + effect)), place(1 + effect))
