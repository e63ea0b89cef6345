"""How long things take at workers that have not measured it yet."""

from __future__ import annotations

from typing import Any

import pytest

from pdd_runtime.pipeline.times import with_times
from pdd_runtime.plugins.routing import WorkerKey, WorkerView


def view(pool: str, index: int, role: Any, **times: Any) -> WorkerView:
    key = WorkerKey(pool, index, "e")
    common: dict[str, Any] = {"cluster": "dc", "cached_tokens": 0, "running": 0, "waiting": 0, "batch_limit": 8}
    return WorkerView(key=key, role=role, **common, **times)


def test_one_that_has_just_started_is_taken_to_be_like_those_of_its_role() -> None:
    known = [view("a", index, "main", request_time=time, token_time=0.01) for index, time in enumerate((0.2, 0.4))]
    fresh, other = view("b", 0, "main"), view("p", 0, "prefill")
    *same, filled, alone = with_times([*known, fresh, other])
    assert same == known
    assert filled.request_time == pytest.approx(0.3)
    assert filled.token_time == pytest.approx(0.01)
    assert alone == other
