from __future__ import annotations

import random
import statistics

import pytest

from pdd_runtime.planner.distribution import Distribution

SPECS = [
    "1000",
    "0.5",
    "uniform(10, 20)",
    "exponential(100)",
    "lognormal(800, 0.6)",
    "beta(8, 1)",
    "choice(10:0.3, 500:0.7)",
]


@pytest.mark.parametrize("spec", SPECS)
def test_it_is_read_back_as_it_is_written(spec: str) -> None:
    distribution = Distribution.parse(spec)
    assert str(distribution) == spec
    assert Distribution.parse(distribution.to_json()) == distribution


@pytest.mark.parametrize("spec", SPECS)
def test_samples_stay_in_bounds_and_depend_on_the_seed_alone(spec: str) -> None:
    distribution = Distribution.parse(spec)
    first, second = random.Random(7), random.Random(7)
    samples = [distribution.sample(first) for _ in range(500)]
    assert samples == [distribution.sample(second) for _ in range(500)]
    low, high = distribution.bounds
    assert all(low <= sample <= high for sample in samples)


def test_means_and_medians_are_what_was_asked_for() -> None:
    rng = random.Random(1)

    def samples(spec: str) -> list[float]:
        return [Distribution.parse(spec).sample(rng) for _ in range(20_000)]

    assert statistics.mean(samples("exponential(100)")) == pytest.approx(100, rel=0.05)
    assert statistics.median(samples("lognormal(800, 0.6)")) == pytest.approx(800, rel=0.05)
    assert statistics.mean(samples("beta(8, 2)")) == pytest.approx(0.8, rel=0.05)
    assert statistics.mean(samples("choice(10:1, 20:3)")) == pytest.approx(17.5, rel=0.05)


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
