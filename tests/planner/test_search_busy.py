from __future__ import annotations

from pathlib import Path

import pytest

from pdd_runtime.planner.search.busy import busy_pools
from pdd_runtime.planner.search.setting import Setting
from pdd_runtime.planner.search.trial import Change, Trial
from tests.planner.test_plan import GRAPH, PLAN, PROFILE
from tests.planner.test_search import POOL, bounds, made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for name, text in (("graph", GRAPH), ("profile", PROFILE), ("plan", PLAN)):
        (tmp_path / f"{name}.yaml").write_text(text)
    return tmp_path / "plan.yaml"


def test_pools_are_as_busy_as_their_work_makes_them() -> None:
    family = made()[0]
    limits = bounds([family])[0]
    models = dict.fromkeys(family.pools, POOL)
    # A prompt of 400 new tokens takes 0.4 s of one of 2 prefill workers. A worker decodes 64 / 0.0164 tokens/s.
    busy = busy_pools(limits, (2, 1, 3), models, 2.5, [(300, 700), (500, 500)], 0.1)
    assert busy["prefill"] == pytest.approx(2.5 * 0.4 / 2)
    assert busy["relay"] == pytest.approx(0.1 * 2.5 * 100 / (64 / 0.0164))
    assert busy["main"] == pytest.approx(0.9 * 2.5 * 100 / (3 * 64 / 0.0164))
    assert busy_pools(limits, (2, 1, 3), models, 50.0, [(300, 700)], 0.1)["prefill"] == 1.0


def test_a_runs_end_does_not_dilute_what_is_used(path: Path) -> None:
    judged = Setting.read(path).verdict
    short = judged(Trial(0, (1, 1, 1), 1.0, 100, 3)).busy
    long = judged(Trial(0, (1, 1, 1), 1.0, 4000, 3)).busy
    assert set(short) == {"prefill", "relay", "main", "wan"}
    assert 0.5 < long["prefill"] < 0.7  # 0.6 s for each prompt of which half is cached
    for name, used in short.items():
        assert used == pytest.approx(long[name], rel=0.25, abs=0.01)


def test_no_link_is_used_more_than_it_is_there(path: Path) -> None:
    judged = Setting.read(path).verdict
    assert judged(Trial(0, (3, 1, 3), 4.0, 300, 3, (Change("wan", 0.01),))).busy["wan"] == pytest.approx(1.0, abs=0.2)
    assert judged(Trial(0, (3, 1, 3), 4.0, 300, 3, (Change("wan", 0.001),))).busy["wan"] <= 1.0


def test_kv_inside_a_cluster_is_as_fast_as_the_plan_says(path: Path) -> None:
    trial = Trial(0, (1, 1, 1), 1.0, 300, 3, (Change("wan", 0.002),))
    slow = Setting.read(path, ["spec.local_rate=1Mbit/s", "spec.slo.decoded=true"]).verdict(trial)
    fast = Setting.read(path, ["spec.local_rate=10Gbit/s", "spec.slo.decoded=true"]).verdict(trial)
    assert slow.relay_share < fast.relay_share
    assert slow.ttft["p50"] > fast.ttft["p50"]
