"""The conformance suite for handoff strategies. Subclass it in your tests and name your class:

```python
class TestMyStrategy(HandoffConformance):
    plugin = MyStrategy
```

It is run with the defaults of `MyStrategy.Config`; override the fixture `strategy` for other settings. The
relay's bounds (`min_relay_tokens`, `max_relay_tokens`) are set by the suite.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, assume, currently_in_test_context, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pdd_runtime.plugins.handoff import HandoffConfig, HandoffStrategy, HandoffView, Step
from pdd_runtime.testing.handoff_simulation import Pair
from pdd_runtime.testing.purity import watched

RATES = st.floats(0.05, 20.0)
MAX_TOKENS = 1000
PROPERTY = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


@st.composite
def bounds(draw: st.DrawFn) -> dict[str, Any]:
    least = draw(st.integers(0, 150))
    return {
        "min_relay_tokens": least,
        "max_relay_tokens": draw(st.one_of(st.none(), st.integers(max(1, least), 300))),
    }


def view(known: int, **changes: Any) -> HandoffView:
    """A session with `known` output tokens, all but the first by the relay, and main ready."""
    facts: dict[str, Any] = {
        "known": known,
        "relay_tokens": max(0, known - 1),
        "main_ready": True,
        "main_known": 0,
        "extending": False,
        "rounds": 0,
        "last_outstanding": None,
        "relay_stopped": False,
        "relay_load": 0.5,
    }
    return HandoffView(**(facts | changes))


@st.composite
def views(draw: st.DrawFn) -> HandoffView:
    """Any moment of any session."""
    known = draw(st.integers(0, 2000))
    rounds = draw(st.integers(0, 8))
    return view(
        known,
        main_ready=draw(st.booleans()),
        main_known=draw(st.integers(0, known)),
        extending=draw(st.booleans()),
        rounds=rounds,
        last_outstanding=draw(st.integers(1, 2000)) if rounds else None,
        relay_stopped=draw(st.booleans()),
        relay_load=draw(st.floats(0, 20)),
    )


class HandoffConformance:
    """What every handoff strategy promises."""

    plugin: ClassVar[type[HandoffStrategy]]

    @pytest.fixture
    def strategy(self) -> HandoffStrategy:
        """The strategy under test."""
        return self.plugin(self.plugin.Config.model_validate({}))

    def test_its_config_has_the_relays_bounds(self, strategy: HandoffStrategy) -> None:
        assert isinstance(strategy.config, HandoffConfig)
        assert strategy.carries in ("tokens", "kv")

    # Pure

    @PROPERTY
    @given(st.lists(views(), min_size=1, max_size=5))
    def test_the_same_view_gives_the_same_step(self, strategy: HandoffStrategy, some: list[HandoffView]) -> None:
        there = [strategy.step(each) for each in some]
        back = [strategy.step(each) for each in reversed(some)]
        other = type(strategy)(strategy.config)
        assert there == back[::-1], "its answer depends on what it was asked before"
        assert there == [other.step(each) for each in some], "another object of the same config said something else"

    def test_deciding_does_no_io(self, strategy: HandoffStrategy) -> None:
        for known in (0, 1, 100):
            strategy.step(view(known))
            with watched() as seen:
                strategy.step(view(known))
            assert not seen, "a strategy is pure: what it needs of the world is in its view and its config"

    # What it may decide

    @pytest.mark.parametrize("known", [0, 1, 50])
    def test_nothing_is_sealed_or_extended_before_main_has_the_prompt(
        self, strategy: HandoffStrategy, known: int
    ) -> None:
        assert strategy.step(view(known, main_ready=False)).kind in ("wait", "stay")

    def test_nothing_is_sealed_before_the_first_token(self, strategy: HandoffStrategy) -> None:
        assert strategy.step(view(0)).kind in ("wait", "stay")

    @PROPERTY
    @given(views())
    def test_a_seal_takes_no_token_back_and_leaves_the_relay_its_minimum(
        self, strategy: HandoffStrategy, now: HandoffView
    ) -> None:
        step = strategy.step(now)
        if step.kind == "seal":
            assert step.tokens >= now.known, "those tokens are with the user already"
            assert now.relay_stopped or step.tokens - 1 >= strategy.config.min_relay_tokens

    def test_a_relay_at_its_bound_is_sealed_when_main_is_ready(self, strategy: HandoffStrategy) -> None:
        """Nothing changes any more: a strategy that waits here waits for ever."""
        now = view(64, relay_stopped=True)
        step = bounded(strategy, {"min_relay_tokens": 0, "max_relay_tokens": 63}).step(now)
        assert step == Step("seal", 64) or step.kind == "extend", f"it said {step.kind}, and the session would hang"

    @PROPERTY
    @given(bounds(), st.floats(0, 20))
    def test_the_relays_bound_is_within_its_limits_under_every_load(
        self, strategy: HandoffStrategy, limits: dict[str, Any], load: float
    ) -> None:
        bound = bounded(strategy, limits).relay_bound(load)
        most = limits["max_relay_tokens"]
        assert bound is not None or most is None
        if bound is not None:
            assert bound >= max(1, limits["min_relay_tokens"])
            assert most is None or bound <= most

    # Whole sessions

    @PROPERTY
    @given(bounds(), RATES, RATES, st.integers(0, 50), st.integers(0, 500), st.floats(0, 4))
    def test_every_session_is_handed_off_or_ends(
        self,
        strategy: HandoffStrategy,
        limits: dict[str, Any],
        relay_rate: float,
        extend_rate: float,
        latency: int,
        ready_at: int,
        load: float,
    ) -> None:
        pair = Pair(bounded(strategy, limits), relay_rate, extend_rate, latency, ready_at, MAX_TOKENS, load)
        how, tokens = pair.run()
        relay_tokens = tokens - 1
        if how == "sealed":
            assert relay_tokens >= limits["min_relay_tokens"], "it sealed before the relay had its minimum"
        least, most = limits["min_relay_tokens"], limits["max_relay_tokens"]
        if most is not None and most < MAX_TOKENS - 1:
            assert how == "sealed", "the relay reached its bound, and main never took over"
            assert least <= relay_tokens <= most

    @pytest.mark.parametrize("n", [1, 2, 7, 64])
    @pytest.mark.parametrize("ready_at", [0, 3, 300])
    def test_with_equal_bounds_the_handoff_is_exactly_there(
        self, strategy: HandoffStrategy, n: int, ready_at: int
    ) -> None:
        exact = bounded(strategy, {"min_relay_tokens": n, "max_relay_tokens": n})
        assert Pair(exact, 0.7, 5.0, 2, ready_at, 500).run() == ("sealed", n + 1)


def bounded(strategy: HandoffStrategy, limits: dict[str, Any]) -> HandoffStrategy:
    """The same strategy with other bounds for its relay; a case that its config refuses is left out."""
    try:
        config = type(strategy.config).model_validate({**strategy.config.model_dump(), **limits})
    except ValidationError as error:
        if currently_in_test_context():
            assume(False)
        pytest.skip(f"its config takes no such bounds: {error}")
    return type(strategy)(config)
