from __future__ import annotations

import pytest

from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.experiments.storm import Asked, Stream, asked
from pdd_runtime.planner.workload import Workload

WANTED = (5, 6, 7, 8)


def stream(*tokens: int, stamps: tuple[float, ...] = (), error: str | None = None) -> Stream:
    outcome = Outcome(0, 0, 1, 0.0, 0.0, list(stamps), list(tokens), 9.0, error)
    return Stream(Asked(0, (1,), len(WANTED), None), outcome)


@pytest.mark.parametrize(
    ("seen", "position"),
    [
        (stream(5, 6, 7, 8), None),
        (stream(5, 6, 9, 8), 2),
        (stream(5, 6, 7), 3),
        (stream(5, 6, 6, 7, 8), 2),
        (stream(5, 6, 7, 8, 9), 4),
        (stream(5, 6, error="lost"), None),
        (stream(5, 7, error="lost"), 1),
        (stream(error="lost"), None),
    ],
)
def test_a_token_that_is_lost_doubled_or_changed_is_found(seen: Stream, position: int | None) -> None:
    assert seen.deviation(WANTED) == position


def test_the_longest_wait_is_known_with_the_token_that_ended_it() -> None:
    seen = stream(5, 6, 7, 8, stamps=(1.0, 1.5, 4.0, 4.5))
    assert (seen.gap, seen.gap_at) == (2.5, 2)
    assert (stream(5, stamps=(1.0,)).gap, stream().gap_at) == (0.0, 0)


def test_the_same_seed_asks_the_same_and_half_of_it_is_seeded() -> None:
    workload = Workload(prompt="uniform(10, 20)", output=5)  # type: ignore[arg-type]
    one, two, other = (asked(workload, 4, seed) for seed in (1, 1, 2))
    assert one == two
    assert {request.tokens for request in one}.isdisjoint({request.tokens for request in other})
    assert [request.seed is None for request in one] == [True, False] * 4
    assert len({request.seed for request in one}) == 5


def test_of_a_conversation_the_first_turn_is_asked() -> None:
    short, long = (Workload(prompt="uniform(10, 20)", turns=turns) for turns in ("1", "3"))  # type: ignore[arg-type]
    assert asked(short, 4, 1) == asked(long, 4, 1)
