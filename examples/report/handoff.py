"""`handoff`: how long main waits to go on behind 100 tokens of the relay, by their KV and by their IDs."""

from __future__ import annotations

import numpy as np
from parameters import fitted_line, parameters
from published import published
from table import Table
from transfers import SEEDS, run

STATISTICS = ("min", "mean", "max", "sd")


def kv_times() -> list[float]:
    """Seconds in which 100 tokens' KV is moved, among the transfers of the skewed test."""
    theirs = published()["handoff"]["kv"]
    runs = [run("skewed", fitted_line(), seed, probe=theirs["payload"]) for seed in SEEDS]
    return [theirs["copies"] + float(time) for each in runs for time in each.probes]


def token_time() -> float:
    """Seconds in which 100 token IDs are sent, and their KV computed."""
    everything = parameters()
    return float(everything["assumed"]["rtt"] / 2 + everything["fitted"]["extend"])


def tables() -> list[Table]:
    theirs, times, tokens = published()["handoff"], np.asarray(kv_times()), token_time()
    ours = {"min": times.min(), "mean": times.mean(), "max": times.max(), "sd": times.std()}
    milliseconds = [
        ["by KV, ms", *(f"{ours[name] * 1e3:.1f}" for name in STATISTICS)],
        ["report", *(f"{theirs['kv'][name] * 1e3:.1f}" for name in STATISTICS)],
        ["by token IDs, ms", "–", f"{tokens * 1e3:.1f}", "–", "–"],
        ["report", *(f"{theirs['tokens'][name] * 1e3:.1f}" for name in STATISTICS)],
    ]
    notes = [
        "By KV: among the transfers of the skewed test, and the report's 24.5 ms of copies. By IDs: the mean is fitted."
    ]
    return [Table("Handing over 100 tokens", ["", *STATISTICS], milliseconds, notes)]
