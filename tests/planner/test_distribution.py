from __future__ import annotations

import numpy as np
import pytest

from pdd_runtime.planner.distribution import Distribution

SPECS = [
    "1000",
    "0.5",
    "uniform(10, 20)",
    "exponential(100)",
    "lognormal(800, 0.6)",
    "beta(8, 1)",
    "beta(0.9, 0.1, 0.02, 0.99)",
    "exponential(3000, 500)",
    "choice(10:0.3, 500:0.7)",
    "choice(uniform(1, 100):0.3, choice(5:1, exponential(3000, 500):2):0.7)",
]


@pytest.mark.parametrize("spec", SPECS)
def test_it_is_read_back_as_it_is_written(spec: str) -> None:
    distribution = Distribution.parse(spec)
    assert str(distribution) == spec
    assert Distribution.parse(distribution.to_json()) == distribution


@pytest.mark.parametrize("spec", SPECS)
def test_samples_stay_in_bounds_and_depend_on_the_seed_alone(spec: str) -> None:
    distribution = Distribution.parse(spec)
    drawn = distribution.draw(np.random.RandomState(7), 500)
    assert np.array_equal(drawn, distribution.draw(np.random.RandomState(7), 500))
    low, high = distribution.bounds
    assert low <= drawn.min() <= drawn.max() <= high


@pytest.mark.parametrize("spec", SPECS)
def test_its_mean_is_that_of_what_it_gives(spec: str) -> None:
    distribution = Distribution.parse(spec)
    drawn = distribution.draw(np.random.RandomState(1), 200_000)
    assert drawn.mean() == pytest.approx(distribution.mean, rel=0.02)


def test_a_choice_takes_each_value_as_often_as_its_weight_says() -> None:
    drawn = Distribution.parse("choice(10:1, uniform(20, 30):3, 99:0)").draw(np.random.RandomState(1), 100_000)
    assert (drawn == 10).mean() == pytest.approx(0.25, rel=0.03)
    assert ((drawn >= 20) & (drawn <= 30)).mean() == pytest.approx(0.75, rel=0.01)
    assert np.median(Distribution.parse("lognormal(800, 0.6)").draw(np.random.RandomState(1), 100_000)) == (
        pytest.approx(800, rel=0.02)
    )


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("many", "'many' is not a number"),
        ("gauss(1, 2)", "no distribution is called 'gauss'"),
        ("uniform(1)", "uniform(LOW, HIGH)"),
        ("uniform(3, 1)", "LOW must not be above HIGH"),
        ("lognormal(0, 1)", "MEDIAN must be above 0"),
        ("choice(10, 20)", "choice(VALUE:WEIGHT"),
        ("choice(10:0)", "weights"),
        ("choice(uniform(3, 1):1)", "LOW must not be above HIGH"),
        ("choice(" * 6 + "1" + ":1)" * 6, "more than 4 deep"),
        ("beta(1, 1, 2)", "beta(A, B[, LOW, HIGH])"),
        ("beta(1, 1, 2, 1)", "LOW must not be above HIGH"),
        ("exponential(5, 9)", "MEAN above it"),
        ("uniform(1, 2))", "not a number"),
        ("exponential(x)", "'x' is not a number"),
        (True, "it must be a number"),
        (None, "it must be a number"),
        (float("nan"), "finite"),
    ],
)
def test_what_is_wrong_is_said(spec: object, why: str) -> None:
    with pytest.raises(ValueError, match=r".") as told:
        Distribution.parse(spec)
    assert why in str(told.value)
