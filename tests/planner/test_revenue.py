from __future__ import annotations

from itertools import pairwise

import pytest

from pdd_runtime.planner.latency import Roofline, RooflineConfig
from pdd_runtime.planner.pool_model import PoolModel
from pdd_runtime.planner.prices import Range, Tariff
from pdd_runtime.planner.revenue import bathtub, prefill_time, request_revenue

HITS = [percent / 100 for percent in range(100)]
TARIFF = Tariff(input=Range(1.0, 1.0), cached=0.1, output=Range(4.0, 5.0))


def pool(model: str, chunk: int) -> PoolModel:
    return PoolModel(Roofline(RooflineConfig(hardware="4x8xh100", model=model)), 64, chunk, 10**9, 64, 0.0, 1e3)


def test_cached_tokens_are_billed_at_their_part() -> None:
    assert request_revenue(TARIFF, 1e6, 0, 0) == (1, 1)
    assert request_revenue(TARIFF, 0, 1e6, 0) == (0.1, 0.1)
    assert request_revenue(TARIFF, 5e5, 5e5, 1e6) == (pytest.approx(4.55), pytest.approx(5.55))


def test_revenue_of_a_token_only_falls_with_the_hit_rate() -> None:
    earned = bathtub(pool("deepseek-v3", 16384), TARIFF, 64000, HITS)
    assert all(before.per_token.low > after.per_token.low for before, after in pairwise(earned))
    assert earned[0].per_token.low == 1
    assert earned[-1].per_token.low == pytest.approx(0.109)


def test_revenue_of_an_hour_is_a_bathtub() -> None:
    """Where attention to a long context is dear: low in the middle, high at the far end."""
    hour = [each.per_hour.low for each in bathtub(pool("deepseek-v3", 16384), TARIFF, 64000, HITS)]
    bottom = hour.index(min(hour))
    assert 30 <= bottom <= 60
    assert hour[bottom] < 0.92 * hour[0]
    assert hour[95] > 1.5 * hour[0]
    assert hour[99] > hour[95]


@pytest.mark.parametrize("model", ["glm-5", "deepseek-v4-pro"])
def test_small_tail_chunks_make_dips_where_new_tokens_are_just_above_whole_chunks(model: str) -> None:
    """The press tells of dips near 20, 40 and 70 %: there 64,000 tokens leave a little more than 3, 2 and 1 chunks."""
    earned = bathtub(pool(model, 16384), TARIFF, 64000, HITS)
    hour = [each.per_hour.low for each in earned]
    dips = [at for at in range(10, 90) if hour[at] < min(hour[at - 1], hour[at + 1])]
    assert dips == [23, 48, 74]
    assert [earned[at].tail for at in dips] == [128, 512, 256]


def test_prefill_goes_chunk_by_chunk() -> None:
    one = pool("glm-5", 16384)
    whole = one.latency.prefill(16384, 1000) + one.latency.prefill(3616, 17384)
    assert prefill_time(one, 20000, 1000) == pytest.approx(whole)
