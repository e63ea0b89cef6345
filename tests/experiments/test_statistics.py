from __future__ import annotations

import random

import pytest

from pdd_runtime.experiments.statistics import intervals, ratio, summary


def test_percentiles_and_mean_of_known_numbers() -> None:
    assert summary([float(n) for n in range(101)]) == {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0}


def test_nothing_measured_is_none() -> None:
    assert set(summary([]).values()) == {None}
    assert set(intervals([]).values()) == {None}
    assert set(intervals([1.0]).values()) == {None}
    point, around = ratio({}, {(0, 0): 1.0})
    assert set(point.values()) == set(around.values()) == {None}


def test_intervals_hold_the_statistic_and_narrow_with_more_numbers() -> None:
    rng = random.Random(1)
    few, many = ([rng.expovariate(1) for _ in range(count)] for count in (30, 3000))
    for name, value in summary(few).items():
        interval = intervals(few)[name]
        assert interval is not None
        assert value is not None
        assert interval[0] <= value <= interval[1]
    widths = []
    for values in (few, many):
        interval = intervals(values)["mean"]
        assert interval is not None
        widths.append(interval[1] - interval[0])
    assert widths[1] < widths[0] / 3


def test_the_same_numbers_give_the_same_interval() -> None:
    values = [random.Random(2).random() for _ in range(50)]
    assert intervals(values) == intervals(values)


def test_a_ratio_pairs_requests_so_that_their_lengths_do_not_blur_it() -> None:
    rng = random.Random(3)
    base = {(n, 0): rng.lognormvariate(0, 2) for n in range(40)}
    point, around = ratio(base, {key: value / 2 for key, value in base.items()})
    for name in point:
        assert point[name] == pytest.approx(0.5)
        assert around[name] == pytest.approx((0.5, 0.5))


def test_a_ratio_is_of_the_requests_that_both_have() -> None:
    point, _ = ratio({(0, 0): 1.0, (1, 0): 2.0, (2, 0): 100.0}, {(0, 0): 2.0, (1, 0): 4.0, (3, 0): 1.0})
    assert point["mean"] == pytest.approx(2.0)
    assert ratio({(0, 0): 0.0}, {(0, 0): 1.0})[0]["mean"] is None
