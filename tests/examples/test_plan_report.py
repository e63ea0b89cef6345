"""examples/plan's profile is what examples/report fitted."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from pdd_runtime.planner.search.setting import Setting

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_plans_workers_are_those_of_the_fit() -> None:
    parameters = yaml.safe_load((EXAMPLES / "report" / "parameters.yaml").read_text())
    fitted, extend = parameters["fitted"]["deployments"], parameters["fitted"]["extend"]
    setting = Setting.read(EXAMPLES / "plan" / "report.yaml")
    models = setting.models[0]
    for new in (1, 640, 6400, 64000):
        expected = fitted["pass_time"] + fitted["token_time"] * new
        assert models["prefill"].latency.prefill(new, 57600) == pytest.approx(expected, rel=1e-3)
    for pool, step in (("relay", fitted["relay"]), ("main", fitted["h200"])):
        for batch in (1, 30, 60, 90):
            grown = step * (1 + fitted["growth"] * (batch / 30 - 1))
            assert models[pool].latency.decode(batch, 64000) == pytest.approx(grown, rel=1e-3)
        delayed = step + fitted["riding"] * (extend - step)
        assert models[pool].latency.prefill(100, 64000) == pytest.approx(delayed, rel=1e-3)
        assert [models[pool].kv_constant, models[pool].kv_token] == parameters["given"]["kv"]
    assert models["prefill"].overhead == fitted["before"]
    assert setting.plan.spec.links["wan"].flow_rate == pytest.approx(8 * fitted["flow_rate"])
    assert setting.loaded.graph.spec.routing.config["threshold"] == pytest.approx(1 - fitted["lacking"])
