"""The strategies without processes: what they decide, and that a session under them always ends on main."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd_runtime.pipeline.handoff_strategies import Adaptive, CatchUp, KvTransfer, OneShot, Stay
from pdd_runtime.plugins.handoff import HandoffStrategy, HandoffView, Step
from pdd_runtime.testing.handoff_simulation import Pair
from pdd_runtime.testing.handoff_suite import RATES, bounds, view, views

ALL: list[type[HandoffStrategy]] = [OneShot, CatchUp, Adaptive, Stay, KvTransfer]
SEALING: list[type[HandoffStrategy]] = [OneShot, CatchUp, Adaptive, KvTransfer]


def make(cls: type[HandoffStrategy], **config: Any) -> HandoffStrategy:
    return cls(cls.Config(**config))


@pytest.mark.parametrize("cls", SEALING)
@pytest.mark.parametrize("known", [0, 1, 50])
def test_nothing_is_sealed_before_main_has_the_prompt(cls: type[HandoffStrategy], known: int) -> None:
    assert make(cls).step(view(known, main_ready=False)).kind == "wait"


@pytest.mark.parametrize("cls", SEALING)
def test_nothing_is_sealed_before_the_first_token(cls: type[HandoffStrategy]) -> None:
    assert make(cls).step(view(0)).kind == "wait"


@pytest.mark.parametrize("cls", [OneShot, KvTransfer])
def test_one_shot_seals_as_soon_as_main_is_ready(cls: type[HandoffStrategy]) -> None:
    assert make(cls).step(view(1)) == Step("seal", 1)
    # The relay is making token 301: it is still for the user.
    assert make(cls).step(view(300)) == Step("seal", 301)
    assert make(cls).step(view(300, relay_stopped=True)) == Step("seal", 300)


@pytest.mark.parametrize("cls", [OneShot, KvTransfer])
def test_one_shot_lets_the_relay_make_its_minimum(cls: type[HandoffStrategy]) -> None:
    strategy = make(cls, min_relay_tokens=7)
    assert strategy.step(view(1)) == Step("seal", 8)
    assert strategy.step(view(7)) == Step("seal", 8)
    assert strategy.step(view(20)) == Step("seal", 21)


def test_what_moves_the_relays_kv_says_so() -> None:
    assert [make(cls).carries for cls in ALL] == ["tokens", "tokens", "tokens", "tokens", "kv"]


def test_catch_up_extends_before_it_seals() -> None:
    strategy = make(CatchUp)
    assert strategy.step(view(100)) == Step("extend", 100)
    assert strategy.step(view(100, extending=True)) == Step("wait")
    assert strategy.step(view(110, main_known=100, rounds=1, last_outstanding=100)) == Step("extend", 110)
    assert strategy.step(view(112, main_known=110, rounds=2, last_outstanding=10)) == Step("seal", 113)


def test_catch_up_seals_when_rounds_do_not_get_shorter() -> None:
    strategy = make(CatchUp)
    assert strategy.step(view(120, main_known=110, rounds=2, last_outstanding=10)) == Step("seal", 121)


def test_catch_up_forgives_a_slow_round_while_much_is_outstanding() -> None:
    strategy = make(CatchUp, threshold=64, patience=3)
    assert strategy.step(view(200, main_known=100, rounds=2, last_outstanding=100)) == Step("extend", 200)
    assert strategy.step(view(200, main_known=100, rounds=3, last_outstanding=100)) == Step("seal", 201)


def test_catch_up_extends_in_batches_while_the_relay_must_go_on() -> None:
    strategy = make(CatchUp, min_relay_tokens=200)
    assert strategy.step(view(65)) == Step("extend", 65)
    assert strategy.step(view(64)) == Step("wait")
    assert strategy.step(view(100, main_known=65, rounds=1, last_outstanding=65)) == Step("wait")
    assert strategy.step(view(201, main_known=197, rounds=3, last_outstanding=65)) == Step("seal", 202)


@pytest.mark.parametrize("cls", ALL)
def test_a_relay_at_its_bound_waits_for_main_only(cls: type[HandoffStrategy]) -> None:
    strategy = make(cls, min_relay_tokens=63, max_relay_tokens=63)
    assert strategy.step(view(64, relay_stopped=True)) == Step("seal", 64)
    assert strategy.step(view(64, relay_stopped=True, main_ready=False)).kind == "wait"


@settings(deadline=None)
@given(views(), bounds())
def test_adaptive_catches_up_while_the_relay_has_room_and_lets_it_go_at_once_while_it_is_busy(
    now: HandoffView, limits: dict[str, Any]
) -> None:
    other = CatchUp if now.relay_load < 0.75 or now.extending else OneShot
    assert make(Adaptive, **limits).step(now) == make(other, **limits).step(now)


@given(bounds(), st.floats(0, 10), st.floats(0, 10))
def test_the_busier_the_relay_the_lower_its_bound(limits: dict[str, Any], one: float, other: float) -> None:
    strategy = make(Adaptive, **limits)
    less, more = (strategy.relay_bound(load) for load in sorted((one, other)))
    assert less is None or (more is not None and more <= less)
    assert strategy.relay_bound(0.0) == limits["max_relay_tokens"]


def test_a_busy_relays_bound_is_shared_by_all_that_are_there() -> None:
    strategy = make(Adaptive, busy=0.5, busy_tokens=100)
    assert [strategy.relay_bound(load) for load in (0.4, 0.5, 1.0, 2.0, 1000.0)] == [None, 100, 50, 25, 1]


def test_none_stays() -> None:
    assert make(Stay).step(view(500)).kind == "stay"


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(ALL), bounds(), RATES, RATES, st.integers(0, 50), st.integers(0, 500), st.floats(0, 4))
def test_every_session_reaches_the_seal_and_respects_the_relays_bounds(
    cls: type[HandoffStrategy],
    config: dict[str, Any],
    relay_rate: float,
    extend_rate: float,
    latency: int,
    ready_at: int,
    load: float,
) -> None:
    strategy = make(cls, **config)
    # Where an extend takes at most half of the time in which the relay made its tokens, what is outstanding halves with
    # each round but for the latency's share: twenty rounds are plenty, of which none takes over 150 ticks in the end.
    most = int(relay_rate * (ready_at + 3000)) + 500
    pair = Pair(strategy, relay_rate, extend_rate, latency, ready_at, max_tokens=most, relay_load=load)
    how, tokens = pair.run()
    relay_tokens = tokens - 1
    if cls is Stay and config["max_relay_tokens"] is None:
        assert how == "finished"
    else:
        assert how == "sealed" or 2 * relay_rate > extend_rate
    if how == "sealed":
        assert relay_tokens >= config["min_relay_tokens"]
        assert config["max_relay_tokens"] is None or relay_tokens <= config["max_relay_tokens"]
    # Pure: asked again, later, by another object, it says the same.
    other = make(cls, **config)
    assert [other.step(now) for now, _ in reversed(pair.seen)] == [step for _, step in reversed(pair.seen)]


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("n", [1, 2, 7, 63, 64, 65])
@pytest.mark.parametrize("ready_at", [0, 3, 1000])
def test_with_equal_bounds_the_handoff_is_exactly_there(cls: type[HandoffStrategy], n: int, ready_at: int) -> None:
    strategy = make(cls, min_relay_tokens=n, max_relay_tokens=n)
    assert Pair(strategy, 0.7, 5.0, 2, ready_at, 500).run() == ("sealed", n + 1)


def test_catch_up_leaves_no_more_than_a_few_tokens_for_the_gap() -> None:
    # Extending is ten times as fast as decoding, as on the CPU engine; the round trip is one decode step.
    pair = Pair(make(CatchUp), 0.1, 1.0, 10, ready_at=4000, max_tokens=5000)
    how, _ = pair.run()
    assert how == "sealed"
    assert pair.seen[-1][0].outstanding <= 4
    assert pair.seen[-1][0].rounds <= 4
