from __future__ import annotations

import json
import re

import pytest

from pdd_runtime.experiments.html import to_html
from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.experiments.report import Measured, Report, report
from pdd_runtime.graph import loads
from pdd_runtime.planner import read_workload
from tests.graphs import pdd

GRAPH = pdd("pdd", wan="bandwidth: 20Mbit/s, rtt: 20ms")
KEYS = ["requests", "errors", "ttft", "tt10", "tpot", "longest_gap", "handoff_gap", "e2e", "tokens", "link_bytes"]


def outcome(number: int, *, slow: float = 1.0, error: str | None = None) -> Outcome:
    """12 tokens: the first after 1 s, then one every 0.1 s, but 0.4 s before the sixth."""
    stamps = [10.0 + number + slow * (1 + 0.1 * n + (0.3 if n >= 5 else 0.0)) for n in range(12)]
    timeline = {
        "tokens": {"prefill": 1, "relay": 4, "main": 7},
        "cached": {"prefill": 50, "main": None},
        "kv": [{"edge": "prefill->relay", "bytes": 1000}, {"edge": "prefill->main", "bytes": 800}],
        "route": "P-RLD-MD",
        "handoff": {"gap": 0.4 * slow},
    }
    return Outcome(
        session=number,
        turn=0,
        prompt=100,
        due=10.0 + number,
        sent=10.0 + number,
        stamps=[] if error else stamps,
        tokens=[] if error else [1] * 12,
        ended=stamps[-1],
        error=error,
        timeline=None if error else timeline,
    )


@pytest.fixture(scope="module")
def made() -> Report:
    graph = loads(GRAPH).graph
    base = Measured("cross", graph, [outcome(n, slow=2.0) for n in range(4)])
    other = Measured("pdd", graph, [*(outcome(n) for n in range(3)), outcome(3, error="503: no route")])
    return report(read_workload("prompt=100,output=12,rate=1"), 4, 7, [base, other])


def test_the_json_has_the_promised_keys(made: Report) -> None:
    data = json.loads(json.dumps(made.to_json()))
    assert {"workload", "graphs", "ratios"} <= set(data)
    assert data["workload"]["rate"] == 1.0
    for graph in data["graphs"].values():
        assert set(KEYS) <= set(graph)
        assert list(graph["tokens"]) == ["prefill", "relay", "main"]
        for metric in KEYS[2:8]:
            assert list(graph[metric]) == ["mean", "p50", "p90", "p99"]
    assert Report.model_validate(data) == made


def test_times_are_from_the_moment_a_request_was_due(made: Report) -> None:
    graph = made.graphs["pdd"]
    assert graph.ttft.p50 == pytest.approx(1.0)
    assert graph.tt10.p50 == pytest.approx(2.2)
    assert graph.tpot.p50 == pytest.approx(1.4 / 11)
    assert graph.longest_gap.p50 == pytest.approx(0.4)
    assert graph.handoff_gap.p50 == pytest.approx(0.4)
    assert graph.e2e.p50 == pytest.approx(2.4)


def test_tokens_bytes_and_routes_are_added_up(made: Report) -> None:
    graph = made.graphs["pdd"]
    assert graph.tokens == {"prefill": 3, "relay": 12, "main": 21}
    assert graph.link_bytes == {"wan": 2400}
    assert graph.edge_bytes == {"prefill->relay": 3000, "prefill->main": 2400}
    assert graph.routes == {"P-RLD-MD": 3}
    assert (graph.output_tokens, graph.prompt_tokens, graph.timelines) == (36, 400, 3)
    assert graph.cached_tokens == {"prefill": 150, "main": 0}


def test_errors_are_counted_and_their_first_message_kept(made: Report) -> None:
    assert (made.graphs["pdd"].requests, made.graphs["pdd"].errors) == (4, 1)
    assert made.graphs["pdd"].first_error == "503: no route"
    assert not made.failed


def test_ratios_are_over_the_first_graph_with_their_intervals(made: Report) -> None:
    assert made.baseline == "cross"
    assert list(made.ratios) == ["pdd"]
    assert made.ratios["pdd"]["ttft"].p90 == pytest.approx(0.5)
    assert made.ci.ratios["pdd"]["ttft"]["p90"] == pytest.approx((0.5, 0.5))
    assert set(made.ci.graphs) == {"cross", "pdd"}


def test_a_graph_without_an_answer_makes_the_whole_fail() -> None:
    workload = read_workload("prompt=100")
    down = Measured("down", None, [], failure="graph down: it cannot start")
    up = Measured("up", None, [outcome(0)])
    made = report(workload, 1, 0, [up, down])
    assert made.failed
    assert (made.graphs["down"].errors, made.graphs["down"].ttft.mean) == (1, None)
    assert made.graphs["down"].first_error == "graph down: it cannot start"
    assert made.ratios["down"]["ttft"].mean is None
    # Without the graph an edge's link is not known.
    assert made.graphs["up"].link_bytes == {}
    assert made.graphs["up"].edge_bytes == {"prefill->relay": 1000, "prefill->main": 800}


def test_a_short_answer_has_no_tenth_token() -> None:
    short = outcome(0)
    short.stamps = short.stamps[:9]
    assert short.metric("tt10") is None
    assert short.metric("tpot") is not None
    short.stamps = short.stamps[:1]
    assert short.metric("tpot") is short.metric("longest_gap") is None
    with pytest.raises(ValueError, match="nothing"):
        short.metric("nothing")


def test_the_page_has_a_chart_for_each_metric_and_fetches_nothing(made: Report) -> None:
    page = to_html(made)
    assert page.count("<svg") == 6
    assert not re.search(r"(?:src|href|url\(|@import|https?:|<script)", page)
    assert "503: no route" in page
    assert "<b>" not in to_html(made.model_copy(update={"baseline": "<b>"}))
