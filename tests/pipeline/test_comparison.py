"""When a variant is surely worse than the control, and when it is not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from pdd_runtime.graph import Guardrails
from pdd_runtime.observe.pace import Pace
from pdd_runtime.observe.sketch import Sketch
from pdd_runtime.observe.tally import Slices
from pdd_runtime.pipeline.comparison import (
    design_effect,
    more_failures,
    order_bounds,
    quantile_ratio,
    share,
    worse,
)

RAILS = Guardrails()
STRETCHES = 20


def tallies(
    requests: int,
    seconds: Callable[[random.Random], float] = lambda draw: draw.lognormvariate(0, 0.5),
    failed: int = 0,
    seed: int = 0,
    tpot: float = 0.05,
) -> Slices:
    """`failed` of the requests fail, all are spread over time; `seconds` are to the first token."""
    draw, slices = random.Random(seed), Slices(1.0)
    for number in range(requests):
        pace = Pace(0.0)
        first = seconds(draw)
        pace.sent(1, first)
        pace.sent(10, first + 10 * tpot * draw.uniform(0.9, 1.1))
        status = 500 if number < failed else 200
        slices.at(number % STRETCHES).saw(status, first + 1, pace, False, None)
    return slices


def test_failures_trip_it() -> None:
    why = worse(RAILS, tallies(200), tallies(60, failed=12))
    assert why.startswith("12 of 60 requests failed, 0 of the control's 200")


def test_failures_of_both_do_not() -> None:
    assert worse(RAILS, tallies(200, failed=40), tallies(60, failed=12)) == ""


def test_a_few_failures_do_not() -> None:
    assert worse(RAILS, tallies(200), tallies(60, failed=2)) == ""


def test_nothing_is_said_below_the_least_number_of_requests() -> None:
    all_fail = tallies(RAILS.requests - 1, failed=RAILS.requests - 1)
    assert worse(RAILS, tallies(200), all_fail) == ""
    assert worse(RAILS, tallies(RAILS.requests - 1), tallies(60, failed=60)) == ""
    assert worse(RAILS.model_copy(update={"requests": 40}), tallies(200), all_fail) != ""


def test_a_slow_first_token_trips_it() -> None:
    why = worse(RAILS, tallies(500), tallies(500, lambda draw: 2 * draw.lognormvariate(0, 0.5), seed=1))
    assert why.startswith("P90 of the time to the first token is ")


def test_slow_tokens_trip_it() -> None:
    assert worse(RAILS, tallies(500), tallies(500, tpot=0.1, seed=1)).startswith("P90 of the time per output token")


def test_what_is_slower_by_less_than_it_may_be_does_not() -> None:
    assert worse(RAILS, tallies(3000), tallies(3000, lambda draw: 1.2 * draw.lognormvariate(0, 0.5), seed=1)) == ""


def test_a_guardrail_that_is_off_does_not_act() -> None:
    off = RAILS.model_copy(update={"errors": None, "tpot_p90": None})
    assert worse(off, tallies(500), tallies(500, failed=400, tpot=0.2, seed=1)) == ""


def test_noise_does_not_trip_it() -> None:
    """The same heavy-tailed times of both, a hundred times."""
    heavy: Callable[[random.Random], float] = lambda draw: draw.paretovariate(1.5)  # noqa: E731
    for seed in range(100):
        assert worse(RAILS, tallies(120, heavy, 2, seed), tallies(120, heavy, 2, seed + 1000)) == ""


def test_a_slow_minute_is_not_a_slow_variant() -> None:
    """All answers of one stretch of time wait for the same thing: that is one piece of news, not fifty."""
    even, bursty = tallies(1000), tallies(950)
    for _ in range(150):
        pace = Pace(0.0)
        pace.sent(1, 20.0)
        bursty.at(3).saw(200, 21.0, pace, False, None)
    assert design_effect(even.sketches("ttft"), 0.9) < 2
    assert design_effect(bursty.sketches("ttft"), 0.9) > 20
    assert worse(RAILS, even, bursty) == ""


def test_too_few_stretches_of_time_say_nothing() -> None:
    once = Slices(1.0)
    once.at(0).merge(tallies(500, lambda draw: 9.0).whole())
    assert worse(RAILS, tallies(500), once) == ""


def test_bounds_of_a_quantile_are_those_of_the_binomial_distribution() -> None:
    # That none of n values is above the 90th percentile has the probability 0.9^n: 0.9^43 > 0.01 > 0.9^44.
    assert order_bounds(43, 0.9, 0.99)[1] is None
    assert order_bounds(44, 0.9, 0.99)[1] == 44
    low, high = order_bounds(100, 0.5, 0.975)
    assert (low, high) == (40, 61)  # as in tables of the sign test
    low, high = order_bounds(100_000, 0.9, 0.999)
    assert low is not None
    assert high is not None
    deviation = math.sqrt(100_000 * 0.9 * 0.1)
    assert (low - 90_000) / deviation == pytest.approx(-3.09, abs=0.02)
    assert (high - 90_000) / deviation == pytest.approx(3.09, abs=0.02)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    draw = random.Random(7)
    held = 0
    for _ in range(300):
        one, other = ([Sketch() for _ in range(STRETCHES)] for _ in range(2))
        for number in range(400):
            one[number % STRETCHES].add(1.3 * draw.expovariate(1))
            other[number % STRETCHES].add(draw.expovariate(1))
        ratio = quantile_ratio(one, other, 0.9, 0.975)
        assert ratio is not None
        held += ratio.low <= 1.3 <= ratio.high
    assert held >= 0.93 * 300


def test_shares_as_in_newcombes_paper() -> None:
    """His examples 56/70 - 48/80 and 10/10 - 0/10, at 95 %."""
    one, other = tallies(70, failed=56).whole(), tallies(80, failed=48).whole()
    found = more_failures(one, other, 0.975)
    assert found is not None
    assert found == pytest.approx((0.0524, 0.2, 0.3339), abs=1e-4)
    one, other = tallies(10, failed=10).whole(), tallies(10).whole()
    assert more_failures(one, other, 0.975) == pytest.approx((0.6075, 1.0, 1.0), abs=1e-4)
    assert share(0, 10, 0.975) == pytest.approx((0.0, 0.0, 0.2775), abs=1e-4)
