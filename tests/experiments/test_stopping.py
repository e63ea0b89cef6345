from __future__ import annotations

import numpy as np
import pytest

from pdd_runtime.experiments.stopping import Boundary


def test_a_single_look_is_the_normal_interval() -> None:
    assert Boundary(0.05).look(1.0) == pytest.approx(1.959964, abs=1e-5)


def test_five_looks_reach_as_far_as_published() -> None:
    """Kim and DeMets' power family with exponent 1, two-sided 5 %: as in Jennison and Turnbull's book, table 7.2."""
    boundary = Boundary(0.05)
    assert [boundary.look(share) for share in (0.2, 0.4, 0.6, 0.8, 1.0)] == pytest.approx(
        [2.576, 2.492, 2.411, 2.339, 2.276], abs=1e-3
    )


@pytest.mark.parametrize("shares", [(0.125, 0.25, 0.5, 1.0), (0.01, 0.02, 0.9, 0.95, 1.0), (0.3, 0.31)])
def test_all_intervals_hold_at_once_as_often_as_promised(shares: tuple[float, ...]) -> None:
    error = 0.05
    boundary = Boundary(error)
    critical = np.array([boundary.look(share) for share in shares])
    steps = np.diff([0.0, *shares])
    sums = np.cumsum(np.random.default_rng(0).standard_normal((200_000, len(shares))) * np.sqrt(steps), axis=1)
    missed = (np.abs(sums) > critical * np.sqrt(shares)).any(axis=1).mean()
    assert missed == pytest.approx(error * shares[-1], abs=0.002)


def test_looks_go_forward() -> None:
    boundary = Boundary(0.05)
    boundary.look(0.5)
    for share in (0.5, 0.4, 1.1):
        with pytest.raises(ValueError, match="cannot follow"):
            boundary.look(share)
