"""Whether a variant does better or worse than the control, and how sure that is. Pure: numbers in, intervals out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

from pdd_runtime.graph import Guardrails
from pdd_runtime.observe.sketch import Sketch
from pdd_runtime.observe.tally import Slices, Tally

P90 = 0.9
LEAST = 6
"""Stretches of time, each with answers, before anything is said about how long they take."""
_FAR = 12.0
"""Standard deviations of a binomial beyond which nothing is summed."""


class Interval(NamedTuple):
    """An estimate, and between which values the truth lies; each bound is one-sided at the confidence asked for."""

    low: float
    middle: float
    high: float


def worse(rails: Guardrails, control: Slices, variant: Slices) -> str:
    """By which guardrail it is surely worse, in words with the numbers; empty: that is not shown."""
    ours, theirs = variant.whole(), control.whole()
    if rails.errors is not None and min(ours.requests, theirs.requests) >= rails.requests:
        above = more_failures(ours, theirs, rails.confidence)
        if above is not None and above.low > rails.errors:
            return (
                f"{ours.failed} of {ours.requests} requests failed, {theirs.failed} of the control's "
                f"{theirs.requests}: surely {above.low:.1%} more, and {rails.errors:.1%} may be"
            )
    for what, name, margin in (
        ("time to the first token", "ttft", rails.ttft_p90),
        ("time per output token", "tpot", rails.tpot_p90),
    ):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if margin is None or min(mine.count, other.count) < rails.requests:
            continue
        ratio = quantile_ratio(variant.sketches(name), control.sketches(name), P90, rails.confidence)
        if ratio is not None and ratio.low > 1 + margin:
            return (
                f"P90 of the {what} is {_seconds(mine)} in {mine.count} answers, the control's {_seconds(other)} in "
                f"{other.count}: surely {ratio.low - 1:.0%} more, and {margin:.0%} may be"
            )
    return ""


def more_failures(variant: Tally, control: Tally, confidence: float) -> Interval | None:
    """By how much the variant's share of failed requests is above the control's; None: one of them has had no request.
    Newcombe's hybrid score interval (Statistics in Medicine 17, 1998, method 10)."""
    if not variant.requests or not control.requests:
        return None
    ours = share(variant.failed, variant.requests, confidence)
    theirs = share(control.failed, control.requests, confidence)
    middle = ours.middle - theirs.middle
    return Interval(
        middle - math.hypot(ours.middle - ours.low, theirs.high - theirs.middle),
        middle,
        middle + math.hypot(ours.high - ours.middle, theirs.middle - theirs.low),
    )


def quantile_ratio(
    variant: Sequence[Sketch], control: Sequence[Sketch], q: float, confidence: float
) -> Interval | None:
    """The variant's quantile over the control's, each given by stretches of time; None: there is too little for bounds.
    Those of each are order statistics, which assume nothing about the distribution; they are combined on the
    logarithmic scale (Zou and Donner, Statistics in Medicine 27, 2008)."""
    ours, theirs = _logarithms(variant, q, confidence), _logarithms(control, q, confidence)
    if ours is None or theirs is None:
        return None
    middle = ours.middle - theirs.middle
    low = middle - math.hypot(ours.middle - ours.low, theirs.high - theirs.middle)
    high = middle + math.hypot(ours.high - ours.middle, theirs.middle - theirs.low)
    return Interval(math.exp(low), math.exp(middle), math.exp(high))


def share(hits: int, of: int, confidence: float) -> Interval:
    """Of so many trials, with Wilson's score interval."""
    z = NormalDist().inv_cdf(confidence)
    found, square = hits / of, z * z
    middle = (found + square / (2 * of)) / (1 + square / of)
    half = z * math.sqrt(found * (1 - found) / of + square / (4 * of * of)) / (1 + square / of)
    return Interval(max(0.0, middle - half), found, min(1.0, middle + half))


def order_bounds(count: int, q: float, confidence: float) -> tuple[int | None, int | None]:
    """The ranks, from 1, of the values between which the `q` quantile lies; None: there are too few to be sure. How
    many of `count` values are below a quantile is binomial, whatever they are."""
    doubt = 1 - confidence
    low = high = None
    below = 0.0
    for rank in range(max(1, math.floor(count * q - _FAR * math.sqrt(count * q * (1 - q)))), count + 1):
        below += _binomial(rank - 1, count, q)
        # So likely are fewer than `rank` values below the quantile: that one is then above it.
        if below <= doubt:
            low = rank
        if 1 - below <= doubt:
            high = rank
            break
    return low, high


def design_effect(parts: Sequence[Sketch], q: float) -> float:
    """How much less `count` values say than so many independent ones: answers that come at the same time wait behind
    the same others. The variance of how many are beyond the quantile, from stretch to stretch of time, over what it
    would be (Kish, Survey Sampling, 1965); at least 1."""
    whole = _merged(parts)
    slow = [(part.at_least(whole.quantile(q) or 0.0), part.count) for part in parts]
    share = sum(hits for hits, _ in slow) / whole.count
    spread = sum((hits - share * count) ** 2 for hits, count in slow) * len(parts) / max(1, len(parts) - 1)
    expected = whole.count * share * (1 - share)
    return max(1.0, spread / expected) if expected else 1.0


def _logarithms(parts: Sequence[Sketch], q: float, confidence: float) -> Interval | None:
    if len(parts) < LEAST:
        return None
    whole = _merged(parts)
    z = NormalDist().inv_cdf(confidence)
    # The design effect is an estimate of few stretches, so bounds are Student's.
    worth = whole.count / design_effect(parts, q) * (z / _student(z, len(parts) - 1)) ** 2
    count = math.floor(worth)
    low, high = order_bounds(count, q, confidence)
    if low is None or high is None:
        return None
    at = [whole.quantile(share) for share in (low / count, q, high / count)]
    return Interval(*(math.log(value) for value in at if value is not None))


def _student(z: float, freedom: int) -> float:
    """The quantile of Student's distribution where the normal one has `z` (Abramowitz and Stegun, 26.7.5)."""
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def _merged(parts: Sequence[Sketch]) -> Sketch:
    whole = Sketch()
    for part in parts:
        whole.merge(part)
    return whole


def _binomial(hits: int, of: int, share: float) -> float:
    chosen = math.lgamma(of + 1) - math.lgamma(hits + 1) - math.lgamma(of - hits + 1)
    return math.exp(chosen + hits * math.log(share) + (of - hits) * math.log1p(-share))


def _seconds(sketch: Sketch) -> str:
    value = sketch.quantile(P90) or 0.0
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
