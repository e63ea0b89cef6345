"""Where queueing theory knows the answer, simulations find it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from pdd_runtime.planner.simulate.events import Events
from pdd_runtime.planner.simulate.link import LinkModel, SimLink
from tests.planner.simulate.closed_forms import holds, stay_shared, stay_shortest, wait_md1, wait_mmc

LINE = 1e8
SIZE = 1e7
SERVICE = SIZE / LINE


def times(model: LinkModel, rate: float, draw: Callable[[random.Random], float], seed: int, count: int) -> float:
    """Mean seconds from when a transfer is asked for to its end, of `count` that come at random, after a tenth."""
    events, numbers = Events(), random.Random(seed)
    link = SimLink(events, model)
    took: list[float] = []

    def come(left: int) -> None:
        at, size = events.now, draw(numbers)
        link.open(size, lambda: took.append(events.now - at)).add(size)
        if left:
            events.push(at + numbers.expovariate(rate), come, left - 1)

    events.push(0.0, come, count - 1)
    events.run()
    kept = took[count // 10 :]
    return sum(kept) / len(kept)


def exponential(numbers: random.Random) -> float:
    return numbers.expovariate(1.0 / SIZE)


def two_sizes(numbers: random.Random) -> float:
    """With the same mean, and nine times the variance of the exponential."""
    return 0.5 * SIZE if numbers.random() < 18 / 19 else 10 * SIZE


@pytest.mark.parametrize("busy", [0.5, 0.7])
def test_equal_transfers_in_order_wait_as_in_m_d_1(busy: float) -> None:
    rate, model = busy / SERVICE, LinkModel(LINE, 0.0, discipline="fifo")
    expected = SERVICE + wait_md1(rate, SERVICE)
    holds(expected, lambda seed: times(model, rate, lambda _: SIZE, seed, 8000), range(10), 0.06)


@pytest.mark.parametrize("connections", [1, 4])
def test_transfers_that_wait_for_connections_wait_as_in_m_m_c(connections: int) -> None:
    model = LinkModel(LINE, 0.0, flow_rate=LINE / connections, connections=connections, discipline="fifo")
    service = SERVICE * connections
    rate = 0.7 * connections / service
    expected = service + wait_mmc(connections, rate, service)
    holds(expected, lambda seed: times(model, rate, exponential, seed, 8000), range(10), 0.08)


@pytest.mark.parametrize("draw", [exponential, two_sizes])
def test_transfers_that_share_fairly_stay_as_under_processor_sharing(draw: Callable[[random.Random], float]) -> None:
    rate, model = 0.6 / SERVICE, LinkModel(LINE, 0.0, discipline="fair")
    holds(stay_shared(rate, SERVICE), lambda seed: times(model, rate, draw, seed, 8000), range(10), 0.12)


def test_shortest_first_stays_as_schrage_and_miller_say() -> None:
    rate, model = 0.8 / SERVICE, LinkModel(LINE, 0.0, ageing=0.0, small=0.0)
    expected = stay_shortest(rate, SERVICE)
    assert expected < 0.6 * stay_shared(rate, SERVICE)
    holds(expected, lambda seed: times(model, rate, exponential, seed, 8000), range(10), 0.08)
