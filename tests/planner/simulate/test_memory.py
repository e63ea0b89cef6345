"""Answers that do not fit into a worker's memory together do not run together."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdd_runtime.planner import Workload
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.simulate import Scenario, simulate

ALONE = ("spec.pools={all: {role: aggregated, cluster: dc-a, engine: {plugin: scripted}}}", "spec.edges=[]")


@pytest.mark.parametrize(("capacity", "slots"), [(10_000, 3), (2 * 1100, 2), (1100, 1), (50, 1)])
def test_who_finds_no_room_waits_for_those_who_have_it(
    capacity: int, slots: int, scenario: Callable[..., Scenario], pool_model: Callable[..., PoolModel]
) -> None:
    full = scenario(*ALONE, models={"all": pool_model(capacity=capacity)})
    ended: list[float] = []
    three = Workload.model_validate({"prompt": 1000, "output": 100, "concurrency": 3})
    made = simulate(full, three, requests=3, warmup=0, observe=lambda outcome: ended.append(outcome.e2e or 0.0))
    assert made.answered == 3
    # A prompt takes a second, and its hundred tokens another: only those that are there slow each other.
    assert sorted(ended)[-1] == pytest.approx({3: 4.0, 2: 5.0, 1: 6.0}[slots], abs=0.05)
