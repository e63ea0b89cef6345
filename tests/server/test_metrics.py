from __future__ import annotations

import pytest

from pdd_runtime.errors import EngineError
from pdd_runtime.server.metrics import scrape

TEXT = """\
# HELP vllm:prompt_tokens_by_source_total Where prompts came from.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 12.0
vllm:prompt_tokens_by_source_total{engine="1",source="local_compute"} 3.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 437.0
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="a \\"quoted\\" one"} 2.0
# TYPE seconds histogram
seconds_bucket{le="0.5"} 4
seconds_bucket{le="+Inf"} 5
seconds_sum 1.5
seconds_count 5
"""


def test_a_value_is_the_sum_over_what_is_not_asked_for() -> None:
    metrics = scrape(TEXT)
    name = "vllm:prompt_tokens_by_source_total"
    assert metrics.value(name) == 452
    assert metrics.value(name, source="local_compute") == 15
    assert metrics.value(name, source="local_compute", engine="1") == 3
    assert metrics.value(name, source="nowhere") == 0
    assert metrics.value("sglang:num_running_reqs") == 2
    assert (metrics.value("seconds_count"), metrics.value("seconds_sum")) == (5, 1.5)


def test_what_is_not_there_is_known_from_what_is_zero() -> None:
    metrics = scrape(TEXT + "idle_total 0\n")
    assert "idle_total" in metrics
    assert "missing_total" not in metrics
    assert metrics.value("missing_total") == metrics.value("idle_total") == 0


@pytest.mark.parametrize("text", ["<html>not found</html>", "a{b=1} 1", "a one"])
def test_what_are_no_metrics_is_said(text: str) -> None:
    with pytest.raises(EngineError, match="metrics cannot be read"):
        scrape(text)


def test_what_is_no_number_is_said_in_labels() -> None:
    assert scrape(TEXT).labels("sglang:num_running_reqs") == [{"model_name": 'a "quoted" one'}]
    assert scrape(TEXT).labels("nothing") == []
