from __future__ import annotations

import random
from collections.abc import Mapping
from math import inf

import numpy as np
import pytest

from pdd_runtime.experiments.outcome import METRICS
from pdd_runtime.experiments.paired import Key, Question, effects, paired_test

P50, P90, MEAN, TYPICAL = (Question("ttft", statistic) for statistic in ("p50", "p90", "mean", "typical"))


def values(ttft: Mapping[Key, float]) -> dict[str, Mapping[Key, float]]:
    return {metric: ttft if metric == "ttft" else {} for metric in METRICS}


def alone(series: Mapping[Key, float]) -> dict[Key, int]:
    return {key: key[0] for key in series}


def test_statistics_are_of_the_requests_that_both_have() -> None:
    base = {(n, 0): float(n) for n in range(1, 101)}
    other = {(n, 0): 2.0 * n for n in range(1, 200)}
    found = effects(values(base), values(other), alone(other), (P50, P90, MEAN))
    assert (found[P50].base, found[P50].other) == (50.5, 101.0)
    assert (found[P90].base, found[P90].difference) == (90.5, 90.5)
    assert found[MEAN].ratio == pytest.approx(2)
    assert {effect.requests for effect in found.values()} == {100}


def test_what_is_long_for_both_makes_the_ratio_no_less_sure() -> None:
    rng = random.Random(1)
    base = {(n, 0): rng.lognormvariate(0, 2) for n in range(60)}
    found = effects(values(base), values({key: 1.1 * value for key, value in base.items()}), alone(base), (P50, P90))
    for effect in found.values():
        assert effect.ratio == pytest.approx(1.1)
        assert effect.ratio_interval(3.0) == pytest.approx((1.1, 1.1))
        assert effect.difference_error > 0.01


def test_what_is_typical_is_the_ratio_of_a_pair_however_unlike_pairs_are() -> None:
    rng = random.Random(5)
    base = {(n, 0): rng.lognormvariate(0, 1) for n in range(60)}
    other = {key: 1.1 * value * rng.lognormvariate(0, 0.05) for key, value in base.items()}
    found = effects(values(base), values(other), alone(base), (P50, TYPICAL))
    assert found[TYPICAL].ratio == pytest.approx(1.1, rel=0.02)
    assert found[TYPICAL].ratio_error == pytest.approx(0.05 / 60**0.5, rel=0.3)
    assert found[P50].ratio_error > 2 * found[TYPICAL].ratio_error
    assert effects(values({(0, 0): 0.0}), values(base), alone(base), (TYPICAL,)) == {}


def test_requests_of_one_block_count_as_one() -> None:
    """Twelve blocks that are each slow or quick as a whole: as if they were single requests, the interval is too narrow
    by about the root of their size."""
    rng = np.random.default_rng(2)
    moods = rng.normal(0, 0.2, (2, 12))
    series = [{(n, 0): float(np.exp(mood[n // 25] + rng.normal(0, 0.02))) for n in range(300)} for mood in moods]
    together = effects(values(series[0]), values(series[1]), {key: key[0] // 25 for key in series[0]}, (MEAN,))[MEAN]
    apart = effects(values(series[0]), values(series[1]), alone(series[0]), (MEAN,))[MEAN]
    assert (together.blocks, apart.blocks) == (12, 300)
    assert together.ratio_error > 3 * apart.ratio_error
    assert together.ratio_error == pytest.approx(0.2 * (2 / 12) ** 0.5, rel=0.5)


def test_three_blocks_show_nothing() -> None:
    base = {(n, 0): 1.0 + n / 100 for n in range(30)}
    other = {key: 3 * value + key[0] % 3 for key, value in base.items()}
    effect = effects(values(base), values(other), {key: key[0] % 3 for key in base}, (P50,))[P50]
    assert effect.ratio_interval(2.0) == (0.0, inf)


def test_a_question_without_values_has_no_answer() -> None:
    base = {(0, 0): 1.0}
    assert effects(values(base), values({(1, 0): 1.0}), {(0, 0): 0, (1, 0): 1}, (P50,)) == {}
    assert effects(values({}), values({}), {}, (P50,)) == {}
    assert effects(values({(0, 0): 0.0}), values(base), {(0, 0): 0}, (P50,)) == {}
    assert effects(values(base), values(base), {(0, 0): 0}, (P50, Question("tt10", "p90"))).keys() == {P50}


def test_a_metric_that_few_blocks_have_leaves_the_others_alone() -> None:
    base = values({(n, 0): 1.0 + n % 7 for n in range(40)})
    few = {(n, 0): 2.0 for n in range(3)}
    found = effects({**base, "tt10": few}, {**base, "tt10": few}, alone(base["ttft"]), (P50, Question("tt10", "mean")))
    assert found[P50].blocks == 40
    assert found[Question("tt10", "mean")].ratio == pytest.approx(1)


def test_the_paired_test_sees_a_shift_and_no_shift() -> None:
    rng = random.Random(4)
    base = {(n, 0): rng.lognormvariate(0, 1) for n in range(80)}
    alike = {key: value * rng.lognormvariate(0, 0.1) for key, value in base.items()}
    slower = {key: value * 1.1 for key, value in alike.items()}
    p, q = paired_test(base, alike), paired_test(base, slower)
    assert p is not None
    assert q is not None
    assert p > 0.05
    assert q < 1e-6
    assert paired_test(base, base) is None
    assert paired_test({}, base) is None


@pytest.mark.parametrize("text", ["ttft", "speed.p90", "ttft.p95", "", "ttft.p90.p50"])
def test_a_question_is_a_metric_and_a_statistic(text: str) -> None:
    with pytest.raises(ValueError, match="they are"):
        Question.parse(text)


def test_a_percentile_needs_requests_behind_it() -> None:
    fewest = {statistic: Question("ttft", statistic).fewest for statistic in ("typical", "mean", "p50", "p90", "p99")}
    assert fewest == {"typical": 10, "mean": 10, "p50": 10, "p90": 50, "p99": 500}
