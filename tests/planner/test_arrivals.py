from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from pdd_runtime.planner.arrivals import Arrivals

SPECS = ["poisson", "fixed", "gamma(3)", "gamma(0.5)", "bursty(5, 10, 60)"]


def starts(spec: str, rate: float, count: int, seed: int = 1) -> np.ndarray:
    return np.array(list(islice(Arrivals.parse(spec).starts(rate, np.random.RandomState(seed)), count)))


@pytest.mark.parametrize("spec", SPECS)
def test_they_come_in_order_at_the_rate_asked_for(spec: str) -> None:
    assert str(Arrivals.parse(spec)) == spec
    times = starts(spec, 20, 200_000)
    assert (np.diff(times) >= 0).all()
    assert len(times) / times[-1] == pytest.approx(20, rel=0.05)


@pytest.mark.parametrize(("spec", "cv"), [("poisson", 1), ("fixed", 0), ("gamma(3)", 3), ("gamma(0.5)", 0.5)])
def test_gaps_vary_as_much_as_asked_for(spec: str, cv: float) -> None:
    gaps = np.diff(starts(spec, 20, 100_000))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_busy_phases_have_the_higher_rate() -> None:
    times = starts("bursty(9, 50, 50)", 100, 200_000)
    counts = np.bincount(times.astype(int))
    # The mean is 100, so that calm seconds have 20 and busy ones 180.
    assert np.percentile(counts, 20) == pytest.approx(20, rel=0.2)
    assert np.percentile(counts, 80) == pytest.approx(180, rel=0.2)


def test_another_rate_stretches_the_same_times() -> None:
    assert starts("gamma(2)", 10, 100) == pytest.approx(starts("gamma(2)", 5, 100) / 2)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("often", "it must be one of poisson"),
        ("bursty(1)", "bursty(FACTOR, BUSY, CALM)"),
        ("gamma(x)", "gamma(CV), with numbers"),
        ("gamma(-1)", "above 0"),
        (3, "it must be one of"),
    ],
)
def test_what_is_wrong_is_said(spec: object, why: str) -> None:
    with pytest.raises(ValueError, match=r".") as told:
        Arrivals.parse(spec)
    assert why in str(told.value)
