"""Counting what becomes of requests."""

from __future__ import annotations

import random

import msgspec
import pytest

from pdd_runtime.observe.pace import Pace
from pdd_runtime.observe.sketch import ERROR, Sketch
from pdd_runtime.observe.tally import LATE, MOST, Seen, Slices, Tallies


def pace(first: float) -> Pace:
    pace = Pace(0.0)
    pace.sent(1, first)
    pace.sent(1, first + 0.1)
    return pace


def test_a_sketch_is_right_to_a_percent_wherever_its_values_are() -> None:
    draw = random.Random(1)
    values = sorted(10 ** draw.uniform(-4, 3) for _ in range(5000))
    one, other = Sketch(), Sketch()
    for number, value in enumerate(values):
        (one, other)[number % 2].add(value)
    one.merge(other)
    for q in (0.001, 0.1, 0.5, 0.9, 0.99, 1.0):
        assert one.quantile(q) == pytest.approx(values[max(0, int(q * 5000) - 1)], rel=1.01 * ERROR)
    assert one.mean == pytest.approx(sum(values) / 5000)
    assert one.at_least(one.quantile(0.9) or 0) == pytest.approx(500, abs=25)
    assert len(one.buckets) < 900


def test_an_empty_sketch_has_no_quantile() -> None:
    assert (Sketch().quantile(0.5), Sketch().mean) == (None, None)


def test_who_was_wrong_or_left_does_not_count_and_who_was_refused_failed() -> None:
    tallies = Tallies(10.0, clock=lambda: 0.0)
    for status in (400, 401, 404, 499):
        tallies.saw(status, 1.0, pace(0.5), False, None)
    for status in (429, 500, 503, 504):
        tallies.saw(status, 1.0, pace(0.5), False, None)
    tallies.saw(200, 1.0, pace(0.5), False, None)
    tallies.saw(200, 1.0, pace(9.0), True, None)
    tally = tallies.seen().whole.whole()
    assert (tally.requests, tally.failed, tally.elsewhere) == (6, 5, 1)
    # Nor does what others served say how quick it is.
    assert tally.ttft.count == 1


def test_what_is_older_than_the_window_is_not_of_late() -> None:
    at = [0.0]
    tallies = Tallies(20.0, clock=lambda: at[0])
    for second in range(1000, 1060):
        at[0] = second
        tallies.saw(200, 1.0, pace(0.5), False, None)
    assert tallies.seen().late.whole().requests == LATE
    assert tallies.seen().whole.whole().requests == 60
    tallies.forget()
    assert tallies.seen().late.whole().requests == 0
    assert tallies.seen().whole.whole().requests == 60


def test_a_long_time_takes_no_more_room() -> None:
    at = [0.0]
    tallies = Tallies(20.0, clock=lambda: at[0])
    for second in range(10_000):
        at[0] = second
        tallies.saw(200, 1.0, pace(0.5), False, None)
    whole = tallies.seen().whole
    assert len(whole.parts) <= MOST
    assert whole.span == 256.0
    assert whole.whole().requests == 10_000


def test_processes_of_different_age_add_up_in_the_same_stretches_of_time() -> None:
    old, young = Slices(1.0), Slices(1.0)
    for second in range(64):
        old.at(second).requests += 1
    for second in range(50, 64):
        young.at(second).requests += 1
    old.coarsen()
    old.coarsen()
    for first, second in ((old, young), (young, old)):
        together = Slices(1.0)
        together.merge(first)
        together.merge(second)
        assert together.span == 4.0
        assert {number: part.requests for number, part in together.parts.items()} == {
            number: 4 + (4 if number > 12 else 2 if number == 12 else 0) for number in range(16)
        }


def test_it_crosses_the_message_plane() -> None:
    tallies = Tallies(20.0)
    tallies.saw(200, 1.0, pace(0.5), False, {"prompt_tokens": 3, "tokens": {"main": 2}, "cached": {"main": None}})
    seen = tallies.seen()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(seen), type=Seen) == seen
