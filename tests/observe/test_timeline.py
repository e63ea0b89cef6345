from __future__ import annotations

import json

from pdd_runtime.observe import Timelines
from pdd_runtime.observe.timeline import Timeline


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


def test_the_body_has_exactly_the_keys_of_the_api_in_their_order() -> None:
    body = Timeline("req-1", "quickstart", 12).body()
    assert list(body) == [
        "id",
        "graph",
        "variant",
        "route",
        "reason",
        "prompt_tokens",
        "cached",
        "tokens",
        "kv",
        "handoff",
        "recoveries",
        "events",
        "finish_reason",
        "error",
    ]
    assert body["cached"] == {"prefill": None, "main": None}
    assert body["tokens"] == {"prefill": 0, "relay": 0, "main": 0}


def test_times_are_seconds_from_arrival() -> None:
    clock = Clock()
    timeline = Timeline("req-1", "quickstart", 12, clock=clock)
    clock.time += 0.25
    timeline.routed("P-RLD-MD", "a cold prompt")
    transfer = timeline.transfer("prefill", "main")
    clock.time += 1.0
    transfer.bytes, transfer.blocks_sent, transfer.finished, transfer.goodput = 4096, 2, timeline.elapsed, 4096.0
    timeline.event("prefill/0", "first token")
    timeline.finished("stop")
    body = json.loads(json.dumps(timeline.body()))
    assert body["route"] == "P-RLD-MD"
    assert body["kv"] == [
        {
            "edge": "prefill->main",
            "bytes": 4096,
            "blocks_sent": 2,
            "blocks_cached": 0,
            "bytes_cached": 0,
            "started": 0.25,
            "finished": 1.25,
            "goodput": 4096.0,
        }
    ]
    assert body["events"] == [
        {"t": 0.25, "worker": "", "what": "route: P-RLD-MD"},
        {"t": 1.25, "worker": "prefill/0", "what": "first token"},
        {"t": 1.25, "worker": "", "what": "finish: stop"},
    ]
    assert body["finish_reason"] == "stop"


def test_a_running_request_shows_what_is_known_so_far() -> None:
    timelines = Timelines()
    timeline = timelines.begin("req-1", "quickstart", 12)
    timeline.hands_off("catch-up").rounds = 1
    found = timelines.get("req-1")
    assert found is timeline
    assert found.body()["handoff"] == {
        "strategy": "catch-up",
        "sealed_at": None,
        "extended": 0,
        "rounds": 1,
        "gap": None,
    }
    assert found.body()["finish_reason"] is None


def test_an_error_is_told_as_the_user_saw_it() -> None:
    timeline = Timeline("req-1", "quickstart", 12)
    timeline.failed(ValueError("no room"))
    assert timeline.body()["error"] == "no room"
    timeline.failed(TimeoutError())
    assert timeline.body()["error"] == "TimeoutError"


def test_a_client_that_leaves_is_an_error_unless_the_end_was_told() -> None:
    gone, served = Timeline("a", "g", 1), Timeline("b", "g", 1)
    served.finished("stop")
    for timeline in (gone, served):
        timeline.cancelled()
        timeline.cancelled()
    assert gone.body()["error"].startswith("cancelled")
    assert [event["what"] for event in gone.body()["events"]] == ["cancelled"]
    assert served.body()["error"] is None


def test_only_the_last_requests_are_kept() -> None:
    timelines = Timelines(limit=3)
    for number in range(5):
        timelines.begin(f"req-{number}", "quickstart", 1)
    assert len(timelines) == 3
    assert timelines.get("req-1") is None
    assert timelines.get("req-4") is not None


def test_two_timelines_share_nothing() -> None:
    one, two = Timeline("a", "g", 1), Timeline("b", "g", 1)
    one.event("", "x")
    one.tokens.main += 1
    one.transfer("p", "m")
    assert two.body()["events"] == []
    assert two.body()["tokens"]["main"] == 0
    assert two.body()["kv"] == []
