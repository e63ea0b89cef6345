"""Whether a variant is surely worse than the control. Pure: numbers in, a sentence out."""

from __future__ import annotations

import math
from statistics import NormalDist

from pdd_runtime.graph import Guardrails
from pdd_runtime.observe.sketch import Sketch
from pdd_runtime.observe.tally import Tally

P90 = 0.9
FAR = 12.0
"""Standard deviations of a binomial beyond which nothing is summed."""


def worse(rails: Guardrails, control: Tally, variant: Tally) -> str:
    """By which of the guardrails, in words with the numbers; empty: it is not shown to be."""
    z = NormalDist().inv_cdf(rails.confidence)
    least = rails.requests
    if min(control.requests, variant.requests) >= least and rails.errors is not None:
        ours, theirs = (tally.failed / tally.requests for tally in (variant, control))
        surely = errors_above(variant, control, z)
        if surely > rails.errors:
            return (
                f"{ours:.1%} of {variant.requests} requests failed, {theirs:.1%} of the control's {control.requests}: "
                f"surely more than {rails.errors:.1%} above it (at least {surely:.1%})"
            )
    for what, name, margin in (
        ("time to the first token", "ttft", rails.ttft_p90),
        ("time per output token", "tpot", rails.tpot_p90),
    ):
        mine, other = getattr(variant, name), getattr(control, name)
        if margin is None or min(mine.count, other.count) < least:
            continue
        ratio = ratio_above(mine, other, P90, z)
        if ratio > 1 + margin:
            return (
                f"P90 of the {what} is {_seconds(mine.quantile(P90))} over {mine.count} answers, the control's "
                f"{_seconds(other.quantile(P90))} over {other.count}: surely more than {margin:.0%} above it "
                f"(at least {ratio - 1:.0%})"
            )
    return ""


def errors_above(variant: Tally, control: Tally, z: float) -> float:
    """The lower bound of how much larger a share of the variant's requests fails, one-sided at `z` standard normal
    deviations: Newcombe's hybrid score interval (Statistics in Medicine 17, 1998, method 10)."""
    ours, low, _ = wilson(variant.failed, variant.requests, z)
    theirs, _, high = wilson(control.failed, control.requests, z)
    return ours - theirs - math.hypot(ours - low, high - theirs)


def ratio_above(variant: Sketch, control: Sketch, q: float, z: float) -> float:
    """The lower bound of the ratio of two quantiles, one-sided at `z`; 0 where there are too few values for one. The
    bounds of each are order statistics, which need no assumption about the distribution; they are combined on the
    logarithmic scale (Zou and Donner, "Construction of confidence limits about effect measures", Statistics in Medicine
    27, 2008)."""
    ours, theirs = variant.quantile(q), control.quantile(q)
    low, high = order_bounds(variant.count, q, z)[0], order_bounds(control.count, q, z)[1]
    if ours is None or theirs is None or low is None or high is None:
        return 0.0
    below = math.log(ours / variant.at(low))
    above = math.log(control.at(high) / theirs)
    return math.exp(math.log(ours / theirs) - math.hypot(below, above))


def wilson(hits: int, of: int, z: float) -> tuple[float, float, float]:
    """A share, and the bounds of its score interval (Wilson 1927)."""
    share, square = hits / of, z * z
    middle = (share + square / (2 * of)) / (1 + square / of)
    half = z * math.sqrt(share * (1 - share) / of + square / (4 * of * of)) / (1 + square / of)
    return share, max(0.0, middle - half), min(1.0, middle + half)


def order_bounds(count: int, q: float, z: float) -> tuple[int | None, int | None]:
    """The ranks, from 1, between which the `q` quantile lies, each one-sided at `z`; None: no value is sure to be
    below, or above, it. How many of `count` values are below a quantile is binomial, whatever they are."""
    alpha = 1 - NormalDist().cdf(z)
    low = high = None
    below = 0.0
    # What is further away has a probability that is lost in rounding.
    first = max(1, math.floor(count * q - FAR * math.sqrt(count * q * (1 - q))))
    for rank in range(first, count + 1):
        below += _binomial(rank - 1, count, q)  # that fewer than `rank` values are below the quantile
        if below <= alpha:
            low = rank
        if 1 - below <= alpha:
            high = rank
            break
    return low, high


def _binomial(hits: int, of: int, share: float) -> float:
    chosen = math.lgamma(of + 1) - math.lgamma(hits + 1) - math.lgamma(of - hits + 1)
    return math.exp(chosen + hits * math.log(share) + (of - hits) * math.log1p(-share))


def _seconds(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
