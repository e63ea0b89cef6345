"""What the scheduler promises, whatever is sent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pdd_tcp.scheduler import Scheduler, Transfer

FRAME = 10
SIZES = st.lists(st.integers(1, 500), min_size=1, max_size=12)


BRIEF = settings(deadline=None, max_examples=20)


def step(scheduler: Scheduler, there: Sequence[Transfer]) -> tuple[Transfer, int]:
    """Send one frame; returns whose it was and its size."""
    chosen = scheduler.pick(there)
    assert chosen is not None
    nbytes = min(FRAME, chosen.left)
    scheduler.sent(chosen, nbytes)
    return chosen, nbytes


def run(scheduler: Scheduler, transfers: Sequence[Transfer]) -> list[Transfer]:
    """Send all; returns them in the order in which they end."""
    there, ended = list(transfers), []
    while there:
        chosen, _ = step(scheduler, there)
        if not chosen.left:
            there.remove(chosen)
            ended.append(chosen)
    return ended


@given(SIZES)
def test_without_ageing_the_shortest_ends_first(sizes: list[int]) -> None:
    transfers = [Transfer(size, float(n)) for n, size in enumerate(sizes)]
    ended = run(Scheduler(ageing=0.0), transfers)
    assert [each.size for each in ended] == sorted(sizes)


@given(SIZES)
def test_fifo_is_first_come_first_served(sizes: list[int]) -> None:
    transfers = [Transfer(size, float(n)) for n, size in enumerate(sizes)]
    assert run(Scheduler("fifo"), transfers) == transfers


@BRIEF
@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=6),
    st.integers(5, 40),
    st.sampled_from([0.05, 0.1, 0.5]),
    st.booleans(),
)
def test_each_one_ends_though_smaller_ones_never_stop_coming(
    sizes: list[int], mouse: int, ageing: float, small: bool
) -> None:
    """R bytes behind O older ones are through when (R + O) / ageing bytes have been sent, and a frame more for each."""
    scheduler = Scheduler(small=40 if small else 0, ageing=ageing)
    elephants = [Transfer(size + 50, float(n)) for n, size in enumerate(sizes)]
    bounds, older = {}, 0
    for each in elephants:
        older += each.size + FRAME
        bounds[each] = (older + FRAME) / ageing
    left, sent, newcomer = list(elephants), 0, Transfer(mouse, 1e6)
    while left:
        chosen, nbytes = step(scheduler, [*left, newcomer])
        sent += nbytes
        if chosen is newcomer:
            newcomer = newcomer if newcomer.left else Transfer(mouse, 1e6 + sent)
        elif not chosen.left:
            left.remove(chosen)
        assert all(sent <= bounds[each] for each in left)


@BRIEF
@given(st.lists(st.integers(500, 5000), min_size=1, max_size=5), st.integers(1, 20), st.integers(0, 50))
def test_a_small_one_waits_for_one_frame_of_others_at_most(sizes: list[int], small: int, before: int) -> None:
    scheduler = Scheduler(small=20, ageing=0.1)
    there = [Transfer(size, float(n)) for n, size in enumerate(sizes)]
    for _ in range(before):
        step(scheduler, there)
    mouse = Transfer(small, 1e6)
    others = 0
    while mouse.left:
        chosen, nbytes = step(scheduler, [*there, mouse])
        others += nbytes if chosen is not mouse else 0
    assert others <= FRAME


def test_small_ones_go_before_others_whatever_their_priority() -> None:
    scheduler = Scheduler(small=20, ageing=0.0)
    urgent, small = Transfer(1000, 0.0, priority=16), Transfer(20, 1.0)
    assert scheduler.pick([urgent, small]) is small


def test_each_step_of_priority_doubles_the_weight() -> None:
    scheduler = Scheduler(ageing=0.0)
    plain, doubled = Transfer(100, 0.0), Transfer(199, 1.0, priority=1)
    assert scheduler.pick([plain, doubled]) is doubled
    assert scheduler.pick([plain, Transfer(201, 1.0, priority=1)]) is plain
    assert scheduler.pick([Transfer(100, 0.0, priority=-1), Transfer(150, 1.0)]) is not plain


@pytest.mark.parametrize("priority", [-(10**9), 10**9])
def test_a_priority_beyond_all_bounds_is_one_at_the_bound(priority: int) -> None:
    assert Transfer(1, 0.0, priority).weight in (2.0**16, 2.0**-16)


def test_of_equals_the_older_goes_first() -> None:
    one, other = Transfer(100, 2.0), Transfer(100, 1.0)
    assert Scheduler(ageing=0.0).pick([one, other]) is other


def test_nothing_to_send_is_nothing_picked() -> None:
    assert Scheduler().pick([]) is None


def test_the_share_of_the_oldest_is_what_was_said() -> None:
    """Over 10,000 frames."""
    scheduler = Scheduler(small=1000, ageing=0.1)
    elephant, mouse = Transfer(1 << 40, 0.0), Transfer(1 << 40, 1.0, priority=4)
    for _ in range(10_000):
        step(scheduler, [elephant, mouse])
    assert elephant.size - elephant.left == pytest.approx(0.1 * 10_000 * FRAME, rel=0.01)
