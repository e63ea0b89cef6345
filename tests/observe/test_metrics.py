from __future__ import annotations

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from pdd_runtime.observe import Timeline
from pdd_runtime.observe.metrics import Metrics, labelled
from pdd_runtime.observe.pace import Pace
from pdd_runtime.plugins.routing import LinkView


def samples(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sample.labels[name] for name in sorted(sample.labels, reverse=True))): sample.value
        for family in text_string_to_metric_families(metrics.text().decode())
        for sample in family.samples
    }


def finished() -> Timeline:
    timeline = Timeline("req-1", "g", 100)
    timeline.routed("P-RLD-MD", "a cold prompt")
    timeline.cached.prefill, timeline.cached.main = 64, None
    timeline.tokens.prefill, timeline.tokens.relay, timeline.tokens.main = 1, 20, 11
    for target, size in (("relay", 1000), ("main", 900)):
        transfer = timeline.transfer("prefill", target)
        transfer.bytes, transfer.bytes_cached = size, 2 * size
    timeline.hands_off("catch-up").gap = 0.07
    timeline.finished("length")
    return timeline


def pace() -> Pace:
    pace = Pace(arrived=10.0)
    for at, tokens in ((10.5, 1), (10.6, 4), (11.0, 8), (11.1, 19)):
        pace.sent(tokens, at)
    return pace


def test_a_pace_tells_what_its_user_saw() -> None:
    seen = pace()
    assert seen.tokens == 32
    assert round(seen.ttft or 0, 3) == 0.5
    assert round(seen.tenth or 0, 3) == 1.0
    assert round(seen.longest_gap or 0, 3) == 0.4
    assert round(seen.tpot or 0, 4) == round(0.6 / 31, 4)


def test_a_pace_of_nothing_or_one_token_claims_nothing() -> None:
    seen = Pace(arrived=1.0)
    assert (seen.ttft, seen.tenth, seen.longest_gap, seen.tpot) == (None, None, None, None)
    seen.sent(1, 1.5)
    assert (seen.ttft, seen.tenth, seen.longest_gap, seen.tpot) == (0.5, None, None, None)


def test_an_answer_is_counted_by_route_tier_and_edge() -> None:
    metrics = Metrics(lambda: 3)
    metrics.ended(200, 1.2, pace(), finished())
    got = samples(metrics)
    assert got["pdd_requests_total", ("200", "P-RLD-MD")] == 1
    assert [got["pdd_tokens_total", (tier,)] for tier in ("prefill", "relay", "main")] == [1, 20, 11]
    assert got["pdd_kv_bytes_total", ("prefill->relay",)] == 1000
    assert got["pdd_kv_bytes_total", ("prefill->main",)] == 900
    assert got["pdd_kv_saved_bytes_total", ("prefill->main",)] == 1800
    assert got["pdd_prompt_tokens_total", ()] == 100
    assert got["pdd_cached_tokens_total", ("prefill",)] == 64
    assert got["pdd_handoff_gap_seconds_count", ()] == 1
    assert got["pdd_sessions", ()] == 3
    for name in ("ttft", "tenth_token", "tpot", "longest_gap", "e2e"):
        assert got[f"pdd_{name}_seconds_count", ("P-RLD-MD",)] == 1
    assert round(got["pdd_longest_gap_seconds_sum", ("P-RLD-MD",)], 3) == 0.4


def test_what_failed_counts_its_bytes_but_not_its_times() -> None:
    metrics = Metrics(lambda: 0)
    metrics.ended(502, 9.0, pace(), finished())
    metrics.ended(400, 0.1)
    got = samples(metrics)
    assert got["pdd_requests_total", ("502", "P-RLD-MD")] == 1
    assert got["pdd_requests_total", ("400", "none")] == 1
    assert got["pdd_kv_bytes_total", ("prefill->main",)] == 900
    assert ("pdd_ttft_seconds_count", ("P-RLD-MD",)) not in got


def test_who_went_on_without_a_worker_is_counted_by_its_role_and_why() -> None:
    metrics, timeline = Metrics(lambda: 0), finished()
    for worker in ("main/0", "main/1"):
        timeline.recovers("main", worker, "silent", RuntimeError("silent"))
    metrics.ended(200, 9.0, pace(), timeline)
    assert samples(metrics)["pdd_recoveries_total", ("main", "silent")] == 2


def test_two_frontends_in_one_process_do_not_meet() -> None:
    one, other = Metrics(lambda: 0), Metrics(lambda: 0)
    one.ended(200, 1.0, pace(), finished())
    assert ("pdd_requests_total", ("200", "P-RLD-MD")) not in samples(other)


def test_kv_that_arrives_after_the_answer_is_counted_once() -> None:
    metrics = Metrics(lambda: 0)
    timeline = Timeline("req-1", "g", 100)
    transfer = timeline.transfer("prefill", "main")
    transfer.bytes = 100
    metrics.ended(200, 1.0, pace(), timeline)
    assert samples(metrics)["pdd_kv_bytes_total", ("prefill->main",)] == 100
    transfer.bytes, transfer.finished = 250, 2.0
    for _ in range(2):
        assert samples(metrics)["pdd_kv_bytes_total", ("prefill->main",)] == 250


def test_several_processes_keep_their_series_apart() -> None:
    one, two = Metrics(lambda: 3), Metrics(lambda: 4)
    one.ended(200, 0.5)
    text = labelled({"0": one.text(), "1": two.text()}).decode()
    assert 'pdd_sessions{replica="0"} 3.0' in text
    assert 'pdd_sessions{replica="1"} 4.0' in text
    assert 'pdd_requests_total{replica="0",route="none",status="200"} 1.0' in text
    assert text.count("# TYPE pdd_sessions gauge") == 1
    assert text.count("# TYPE pdd_ttft_seconds histogram") == 1


def test_links_are_told_as_they_are_at_each_scrape() -> None:
    wan = LinkView(name="wan", source="dc-a", target="dc-b", bandwidth=25e6, rtt=0.05)
    links = [wan]
    metrics = Metrics(lambda: 0, lambda: links)
    way = ("dc-b", "dc-a", "wan")
    assert samples(metrics)["pdd_link_rtt_seconds", way] == 0.05
    # What nobody has measured is not told as zero.
    assert ("pdd_link_goodput_bytes", way) not in samples(metrics)
    links[0] = msgspec.structs.replace(wan, goodput=2e7, queue=300, sent=5000, retransmits=2)
    now = samples(metrics)
    assert now["pdd_link_goodput_bytes", way] == 2e7
    assert now["pdd_link_queue_bytes", way] == 300
    assert now["pdd_link_sent_bytes", way] == 5000
    assert now["pdd_link_retransmits", way] == 2
