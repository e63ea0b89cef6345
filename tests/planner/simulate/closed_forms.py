"""What queueing theory says, and how a simulation is held against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np


def erlang_c(servers: int, load: float) -> float:
    """The share of customers of M/M/c that wait; `load` is arrivals x service time (Erlang 1917)."""
    served = sum(load**k / math.factorial(k) for k in range(servers))
    waiting = load**servers / math.factorial(servers) * servers / (servers - load)
    return waiting / (served + waiting)


def wait_mmc(servers: int, rate: float, service: float) -> float:
    """Mean wait of M/M/c."""
    load = rate * service
    return erlang_c(servers, load) * service / (servers - load)


def wait_md1(rate: float, service: float) -> float:
    """Mean wait of M/D/1 (Pollaczek and Khinchine)."""
    busy = rate * service
    return busy * service / (2.0 * (1.0 - busy))


def stay_shared(rate: float, service: float) -> float:
    """Mean time in M/G/1 under processor sharing, whatever the distribution of service times."""
    return service / (1.0 - rate * service)


def stay_shortest(rate: float, service: float) -> float:
    """Mean time in M/M/1 under shortest remaining first (Schrage and Miller 1966), integrated numerically."""
    size = np.linspace(0.0, 40.0 * service, 400_001)
    step = size[1] - size[0]
    density = np.exp(-size / service) / service
    above = np.exp(-size / service)
    busy = rate * _sums(size * density, step)
    waits = rate * (_sums(size**2 * density, step) + size**2 * above) / (2.0 * (1.0 - busy) ** 2)
    serves = _sums(1.0 / (1.0 - busy), step)
    return float(_sums((waits + serves) * density, step)[-1])


def _sums(
    values: np.ndarray[tuple[int], np.dtype[np.float64]], step: float
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The integral from 0 to each place, by trapezoids."""
    return np.concatenate(([0.0], np.cumsum((values[1:] + values[:-1]) / 2.0) * step))


def holds(expected: float, once: Callable[[int], float], seeds: Sequence[int], within: float) -> None:
    """The mean over seeds, each a run of its own, is as expected: in the interval that would miss it once in a
    thousand times, where that is no wider than `within` of it."""
    found = [once(seed) for seed in seeds]
    mean = sum(found) / len(found)
    error = math.sqrt(sum((each - mean) ** 2 for each in found) / (len(found) - 1) / len(found))
    # Student's t of 9 degrees of freedom, both sides together 0.001; more seeds make it smaller.
    half = 4.781 * error
    assert len(found) >= 10
    assert half <= within * expected, f"too few requests: {mean:.5g} ± {half:.2g}"
    assert abs(mean - expected) <= half, f"{mean:.5g} ± {half:.2g}, and theory has {expected:.5g}"
