"""A request that asks for more than the context holds is refused, as the frontend refuses it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdd_runtime.frontend.errors import ContextTooLongError
from pdd_runtime.frontend.language import Language
from pdd_runtime.frontend.model import ServedModel
from pdd_runtime.kv import KvLayout
from pdd_runtime.planner import Workload
from pdd_runtime.planner.context_limit import ContextLimit
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.simulate import Outcome, Scenario, simulate
from pdd_runtime.plugins.engine import Capabilities, EngineInfo
from pdd_runtime.testing.byte_tokenizer import byte_tokenizer

Make = Callable[..., Scenario]
LIMIT = 1000


@pytest.fixture
def limited(scenario: Make, pool_model: Callable[..., PoolModel]) -> Make:
    """A graph in which the pool `where` takes sequences of 1,000 tokens, and the others any."""

    def make(*overrides: str, where: str = "main", **other: object) -> Scenario:
        return scenario(*overrides, models={where: pool_model(context=ContextLimit(LIMIT, "", (where,)))}, **other)

    return make


@pytest.fixture(scope="module")
def served() -> ServedModel:
    """What the frontend serves of such a pool."""
    info = EngineInfo(
        model="toy",
        fingerprint="",
        layout=KvLayout(layers=1, kv_heads=1, head_dim=2, dtype="float32", block_size=16),
        capacity_blocks=64,
        context_length=LIMIT,
        batch_limit=16,
        capabilities=Capabilities(),
    )
    return ServedModel(info, Language(byte_tokenizer()))


@pytest.mark.parametrize(
    ("prompt", "output"), [(900, 100), (900, 101), (999, 1), (1000, 1), (5000, 1), (1, 999), (1, 1000)]
)
@pytest.mark.parametrize("where", ["prefill", "relay", "main"])
def test_it_refuses_what_the_frontend_refuses(
    prompt: int, output: int, where: str, limited: Make, served: ServedModel
) -> None:
    made = simulate(limited(where=where), Workload(prompt=prompt, output=output, rate=1.0), requests=10, warmup=0)
    try:
        assert served.room(prompt, output, 16, "prompt") == output
    except ContextTooLongError:
        assert (made.answered, made.rejected, made.too_long) == (0, 10, 10)
    else:
        assert (made.answered, made.rejected, made.too_long) == (10, 0, 0)


def test_it_is_no_question_of_admission(limited: Make) -> None:
    made = simulate(limited(admission=False), Workload(prompt=2000, output=9, rate=1.0), requests=10)
    assert (made.rejected, made.too_long) == (10, 10)


def test_a_conversation_is_served_until_it_is_too_long(limited: Make) -> None:
    """Each turn has 100 tokens more in its prompt, and 50 in its answer: 150, 300, … 900 are served, and four more are
    not."""
    talk = Workload.model_validate({"prompt": 100, "new": 100, "output": 50, "turns": 10, "concurrency": 1, "hit": 0})
    seen: list[Outcome] = []
    made = simulate(limited(), talk, requests=20, warmup=0, observe=seen.append)
    assert [bool(outcome.route) for outcome in seen] == ([True] * 6 + [False] * 4) * 2
    assert (made.requests, made.answered, made.rejected, made.too_long) == (20, 12, 8, 8)
    assert made.to_json()["too_long"] == 8


def test_those_who_are_refused_take_nothing_from_the_others(limited: Make) -> None:
    """One in two is too long, and nobody else waits for it: a prefill worker has 0.2 s of work in two seconds."""
    mixed = Workload.model_validate({"prompt": "choice(100:0.5, 100000:0.5)", "output": 2, "rate": 1.0})
    made = simulate(limited(), mixed, requests=200)
    assert 60 < made.too_long == made.rejected < 140
    assert made.ttft.p99 is not None
    assert made.ttft.p99 < 0.5


def test_what_is_refused_before_the_measured_ones_does_not_count(limited: Make) -> None:
    made = simulate(limited(), Workload(prompt=5000, output=1, rate=1.0), requests=10, warmup=30)
    assert (made.requests, made.too_long) == (10, 10)
