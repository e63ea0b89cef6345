"""How long things take in a pool, from what its workers measure."""

from __future__ import annotations

import pytest

from pdd_runtime.pipeline.times import Times, times_of
from pdd_runtime.plugins.engine import Load


def test_the_workers_of_a_pool_are_alike_also_one_that_has_just_started() -> None:
    found = times_of(
        [
            ("a", "main", Load(token_time=0.01, request_time=0.2)),
            ("a", "main", Load(request_time=0.4)),
            ("a", "main", Load()),
        ]
    )
    assert found["a"].token == 0.01
    assert found["a"].request == pytest.approx(0.3)


def test_a_pool_that_has_measured_nothing_is_like_the_others_of_its_role() -> None:
    found = times_of(
        [
            ("old", "main", Load(token_time=0.02, request_time=0.2)),
            ("new", "main", Load()),
            ("half", "main", Load(request_time=0.6)),
            ("other", "prefill", Load()),
        ]
    )
    assert found["new"].request == pytest.approx(0.4)
    assert found["half"] == Times(0.02, 0.6)
    assert found["other"] == Times()
