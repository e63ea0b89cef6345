"""`collapse`: what becomes of PDD when requests end on the relay (the report's figure 5)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
from models import fitted, scenario, with_routing
from published import deployment
from table import Table

from pdd_runtime.pipeline.routing_policies import HitThreshold
from pdd_runtime.planner import Workload
from pdd_runtime.planner.simulate import Outcome, Scenario, simulate
from pdd_runtime.plugins import PluginManager
from pdd_runtime.plugins.routing import ClusterView, RequestFacts, Route, RoutingPolicy

REQUESTS, RATE = 8_000, 11.5
WINDOW, WINDOWS = 120.0, 5
"""Seconds of a row, and rows."""
CONVERSATIONS = Workload.model_validate({
    "prompt": 10_000, "new": 200, "turns": 6, "think": 30, "rate": RATE,
    "output": "choice(uniform(5, 100):0.3, uniform(100, 500):0.417, exponential(3036, 500):0.283)",
})  # fmt: skip
"""Six turns each, of which main lacks the first one's prompt, and then little."""


class EndsOnRelay(HitThreshold):
    """Whatever needs a relay ends there."""

    name = "ends-on-relay"

    def plan(self, facts: RequestFacts, view: ClusterView) -> Route:
        route = super().plan(facts, view)
        return msgspec.structs.replace(route, kind="P-RLD") if route.kind == "P-RLD-MD" else route


class Plugins(PluginManager):
    """The installed ones, and that policy."""

    def routing(self, name: str) -> type[RoutingPolicy]:
        return EndsOnRelay if name == EndsOnRelay.name else super().routing(name)


UNBOUNDED = "whoever finds too little on main, unbounded"
ALL = {"max_tokens": 1_000_000, "cached": 1.0, "requests": 1.0, "slots": 1.0}
"""`finish_on_relay` with no bound left but the gap between the hit rates."""


def cases() -> dict[str, Scenario]:
    plugins = Plugins()
    plugins.load()
    numbers = fitted()
    made = partial(scenario, "pdd", numbers, plugins=plugins)
    routed = partial(with_routing, deployment("pdd"), threshold=1.0 - numbers.lacking)
    return {
        "never": made(),
        UNBOUNDED: made(graph=routed(EndsOnRelay.name)),
        "the same, stopped by `hit_rate_gap` alone": made(graph=routed("hit-threshold", finish_on_relay=ALL)),
        "the defaults of `finish_on_relay`": made(graph=routed("hit-threshold", finish_on_relay={})),
    }


def rows(case: Scenario, requests: int = REQUESTS) -> list[dict[str, Any]]:
    """What a window's requests met: by when they were sent."""
    seen: list[Outcome] = []
    simulate(case, CONVERSATIONS, requests=requests, seed=1, warmup=0, observe=seen.append)
    made = []
    for window in range(WINDOWS):
        there = [outcome for outcome in seen if outcome.due // WINDOW == window and outcome.tt2 is not None]
        prompts = sum(outcome.prompt for outcome in there)
        made.append({
            "until": (window + 1) * WINDOW / 60,
            "prefill": sum(outcome.prefill_cached for outcome in there) / prompts,
            "main": sum(outcome.main_cached for outcome in there) / prompts,
            "relay": sum(outcome.relay_tokens for outcome in there) / sum(outcome.output for outcome in there),
            "ended": sum(outcome.route == "P-RLD" for outcome in there) / len(there),
            "ttft": float(np.quantile([outcome.tt2 for outcome in there if outcome.tt2 is not None], 0.9)),
        })  # fmt: skip
    return made


def tables() -> list[Table]:
    found = {label: rows(case) for label, case in cases().items()}
    minutes = [f"{row['until'] - WINDOW / 60:.0f}–{row['until']:.0f}" for row in found[UNBOUNDED]]
    over_time = [
        [name, *(form(row[key]) for row in found[UNBOUNDED])] for key, (name, form) in FIGURES.items() if key != "ended"
    ]
    columns = ["ends on the relay", *(name for name, _ in FIGURES.values())]
    at_last = [
        [label, *(form(windows[-1][key]) for key, (_, form) in FIGURES.items())] for label, windows in found.items()
    ]
    note = "Conversations of six turns, 11.5 requests/s, over PDD. Main lacks all of a first prompt, and then little."
    return [
        Table("Whatever needs a relay ends there: requests sent in minutes", ["", *minutes], over_time, [note]),
        Table(f"Requests sent in minutes {minutes[-1]}", columns, at_last),
    ]


def _percent(value: float) -> str:
    return f"{value:.1%}".replace("%", " %")


def _seconds(value: float) -> str:
    return f"{value:.1f} s"


FIGURES: dict[str, tuple[str, Callable[[float], str]]] = {
    "prefill": ("prefill's hit rate", _percent),
    "main": ("main's hit rate", _percent),
    "ended": ("end on the relay", _percent),
    "relay": ("tokens by the relay", _percent),
    "ttft": ("P90 to the second token", _seconds),
}
