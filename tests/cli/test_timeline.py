from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from pdd_runtime.cli.console import plain
from pdd_runtime.cli.timeline import draw


def body(**changes: Any) -> dict[str, Any]:
    """A request that took the relay, as `GET /pdd/requests/{id}` tells it."""
    events = [
        (0.00, "", "route: P-RLD-MD"),
        (0.01, "prefill/0", "prefill starts"),
        (0.50, "prefill/0", "prefill ends: 1000 tokens, 0 of them cached"),
        (0.50, "prefill/0", "first token"),
        (0.55, "relay/0", "relay starts"),
        (1.60, "main/0", "extended: to 20 tokens, 20 computed"),
        (1.70, "", "seal: 24 tokens"),
        (1.72, "relay/0", "relay stops: sealed"),
        (1.75, "main/0", "main starts: behind 24 tokens"),
        (1.90, "main/0", "commit: gap 0.200 s"),
        (4.00, "main/0", "main stops: length"),
        (4.00, "", "finish: length"),
    ]
    return {
        "id": "req-1",
        "graph": "quickstart",
        "variant": "",
        "route": "P-RLD-MD",
        "reason": "0 of 1000 prompt tokens (0%) are cached on main, below the threshold of 90%",
        "prompt_tokens": 1000,
        "cached": {"prefill": 0, "main": 0},
        "tokens": {"prefill": 1, "relay": 23, "main": 76},
        "kv": [
            transfer("prefill->relay", 0.1, 0.54, 46_080_000),
            transfer("prefill->main", 0.1, 1.5, 46_080_000),
        ],
        "handoff": {"strategy": "catch-up", "sealed_at": 24, "extended": 24, "rounds": 1, "gap": 0.2},
        "events": [{"t": t, "worker": worker, "what": what} for t, worker, what in events],
        "recoveries": [],
        "finish_reason": "length",
        "error": None,
        **changes,
    }


def transfer(edge: str, started: float, finished: float | None, size: int, cached: int = 0) -> dict[str, Any]:
    return {
        "edge": edge,
        "bytes": size,
        "blocks_sent": 63 - cached,
        "blocks_cached": cached,
        "started": started,
        "finished": finished,
        "goodput": size / (finished - started) if finished else 0.0,
    }


def drawn(timeline: dict[str, Any], width: int = 30) -> list[str]:
    console = Console(width=200, color_system=None)
    with console.capture() as capture:
        console.print(draw(timeline, width))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_relayed_request_is_drawn_on_one_axis_and_explained() -> None:
    assert drawn(body()) == [
        "timeline of req-1  route P-RLD-MD",
        "prefill      █████                          0.01–0.50 s 1000 tokens, 0 of them cached",
        "KV → relay    █████                         0.10–0.54 s 46.1 MB, 63 blocks, 838 Mbit/s",
        "KV → main     ███████████████               0.10–1.50 s 46.1 MB, 63 blocks, 263 Mbit/s",
        "relay tokens      █████████████             0.55–1.72 s 23 tokens",
        "handoff                      ████           1.60–1.90 s catch-up: after token 24, 24 extended, gap 200 ms",
        "main tokens                      █████████▶ 1.90–4.00 s 76 tokens",
        "             0······················2.85 s…",
        "Why this route: 0 of 1000 prompt tokens (0%) are cached on main, below the threshold of 90%.",
        "While 46.1 MB of KV crossed to main in 1.40 s, the relay made 23 tokens. Then token IDs, not their KV, went "
        "to main, which computed the KV of 24 tokens; the user saw a gap of 200 ms.",
    ]


def test_the_variant_is_named() -> None:
    assert drawn(body(variant="b"))[0] == "timeline of req-1  route P-RLD-MD  variant b"


def test_who_took_over_from_whom_is_told() -> None:
    lost = {"t": 2.5, "role": "main", "worker": "main/0", "reason": "worker-lost", "why": "worker main/0 was lost"}
    shown = drawn(body(recoveries=[{**lost, "to": "main/1"}, {**lost, "t": 3.0, "to": ""}]))
    assert "At 2.50 s: worker main/0 was lost (worker-lost); main/1 took over." in shown
    assert "At 3.00 s: worker main/0 was lost (worker-lost); nobody had to take over." in shown


def test_a_second_turn_says_what_main_had() -> None:
    events = [(0.0, "prefill starts"), (0.1, "prefill ends: 1000 tokens, 960 of them cached"), (0.5, "main starts")]
    direct = body(
        route="P-MD",
        reason="",
        cached={"prefill": 960, "main": 960},
        kv=[transfer("prefill->main", 0.05, 0.4, 1_000_000, cached=60)],
        handoff=None,
        tokens={"prefill": 1, "relay": 0, "main": 9},
        events=[{"t": t, "worker": "", "what": what} for t, what in [*events, (1.0, "main stops: stop")]],
    )
    assert drawn(direct) == [
        "timeline of req-1  route P-MD",
        "prefill     ████                           0.00–0.10 s 1000 tokens, 960 of them cached",
        "KV → main     ██████████████               0.05–0.40 s 1.0 MB, 3 blocks, 60 were there, 23 Mbit/s",
        "main tokens                     █████████▶ 0.50–1.00 s 9 tokens",
        "            0······················0.75 s…",
        "Main had the KV of 960 of the prompt's 1000 tokens: 1.0 MB went to it before it could go on.",
    ]


def test_one_that_waited_for_its_admission_and_ended_on_the_relay() -> None:
    events = [
        (0.0, "queued: behind 2: main/0 is full with 16 of 16 requests"),
        (0.5, "admitted: after 0.500 s"),
        (0.5, "prefill starts"),
        (1.0, "prefill ends: 1000 tokens, 0 of them cached"),
        (1.1, "relay starts"),
        (2.0, "relay stops: length"),
    ]
    finished = body(
        route="P-RLD",
        reason="",
        kv=[transfer("prefill->relay", 0.6, 1.1, 1_000_000)],
        handoff=None,
        tokens={"prefill": 1, "relay": 9, "main": 0},
        events=[{"t": t, "worker": "", "what": what} for t, what in events],
    )
    assert drawn(finished) == [
        "timeline of req-1  route P-RLD",
        "queued       █████████                      0.00–0.50 s no room",
        "prefill               █████████             0.50–1.00 s 1000 tokens, 0 of them cached",
        "KV → relay             ██████████           0.60–1.10 s 1.0 MB, 63 blocks, 16 Mbit/s",
        "relay tokens                     █████████▶ 1.10–2.00 s 9 tokens",
        "             0······················1.65 s…",
        "The relay served it to its end, and its KV never crossed to main.",
    ]


def test_a_request_that_failed_on_the_way_shows_how_far_it_came() -> None:
    events = [{"t": 0.0, "worker": "prefill/0", "what": "prefill starts"}, {"t": 2.0, "worker": "", "what": "error: X"}]
    lines = drawn(
        body(
            events=events,
            kv=[transfer("prefill->main", 0.5, None, 3)],
            handoff=None,
            error="worker main/0 was lost \x1b[2J",
            finish_reason=None,
            tokens={"prefill": 0, "relay": 0, "main": 0},
        )
    )
    assert lines[1].startswith("prefill     ░")
    assert lines[2].startswith("KV → main          ░")
    assert lines[-1] == "It failed: worker main/0 was lost [2J"


@pytest.mark.parametrize("route", ["", "A", "P-MD", "P-RLD-MD"])
def test_a_request_that_has_only_begun_is_drawn_too(route: str) -> None:
    nothing = body(route=route, events=[], kv=[], handoff=None, reason="", tokens={"prefill": 0, "relay": 0, "main": 0})
    assert drawn(nothing)[0] == f"timeline of req-1  route {route or 'none'}"


def test_no_text_of_a_model_or_a_log_moves_the_terminal() -> None:
    assert plain("a\x1b[31mb\r\x07\tc\nd\x9b2Jé") == "a[31mb\tc\nd2Jé"
