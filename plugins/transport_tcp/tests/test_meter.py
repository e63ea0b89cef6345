"""Goodput is that of a busy link, and of late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pdd_tcp.meter import SHORTEST, Meter

RATE = 1e6


def busy(meter: Meter, at: float, seconds: float, rate: float = RATE) -> float:
    """Keep it busy; returns the time thereafter."""
    meter.made(int(seconds * rate), at)
    for n in range(100):
        meter.left(int(seconds * rate / 100), at + (n + 1) * seconds / 100)
    return at + seconds


def test_it_is_unknown_before_anything_was_sent() -> None:
    meter = Meter()
    assert meter.goodput is None
    assert (meter.queue, meter.sent) == (0, 0)


def test_idle_time_does_not_count() -> None:
    meter, at = Meter(), 0.0
    for _ in range(10):
        at = busy(meter, at, 1.0) + 100.0
    assert meter.goodput == pytest.approx(RATE, rel=0.01)


def test_a_burst_shorter_than_can_be_measured_says_nothing() -> None:
    meter = Meter()
    busy(meter, 0.0, SHORTEST / 2)
    assert meter.goodput is None


def test_it_follows_the_link() -> None:
    meter = Meter()
    at = busy(meter, 0.0, 5.0)
    busy(meter, at, 20.0, RATE / 10)
    assert meter.goodput == pytest.approx(RATE / 10, rel=0.02)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 1000), st.floats(0.0, 1.0)), max_size=50))
def test_the_queue_is_what_was_made_and_neither_sent_nor_dropped(steps: list[tuple[bool, int, float]]) -> None:
    meter, at, queue, sent = Meter(), 0.0, 0, 0
    for drop, nbytes, pause in steps:
        meter.made(2 * nbytes, at)
        at += pause
        (meter.dropped if drop else meter.left)(nbytes, at)
        queue, sent = queue + nbytes, sent + (0 if drop else nbytes)
    assert (meter.queue, meter.sent) == (queue, sent)
