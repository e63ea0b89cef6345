"""`transfers`: KV over a line at 80 requests/s, with skewed and with narrow hit rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from intervals import interval
from line import Carried, carry, first, payloads
from parameters import Line, fitted_line, narrow, parameters, skewed
from published import published
from table import Table

SEEDS = range(12)
Figures = dict[str, float]


def run(kind: str, line: Line, seed: int, probe: float = 0.0, discipline: str = "fair") -> Carried:
    """One run of the transfer test, `skewed` or `narrow`. `shortest`: as our transport sends, where all use the same
    connections and none waits for one."""
    given = parameters()["given"]
    workload, fresh = (skewed(), line.fresh) if kind == "skewed" else (narrow(), 1.0)
    pool: dict[str, Any] = {} if discipline == "fair" else {"discipline": discipline, "connections": None}
    sizes = first(payloads(workload, seed, given["kv"], fresh), line.transfers)
    return carry(sizes, given["transfer_rate"], replace(line.model(), **pool), seed, probe=probe)


def figures(carried: Carried) -> Figures:
    """As the report prints them: latencies without the wait for a connection."""
    return {
        "least": float(np.quantile(carried.size, 0.001)),
        "most": float(np.quantile(carried.size, 0.999)),
        "p50": float(np.quantile(carried.times, 0.5)),
        "p99": float(np.quantile(carried.times, 0.99)),
        "queueing": float(carried.waits.mean()),
        "pool": carried.used,
        **{f"total p{q}": float(np.quantile(carried.waits + carried.times, q / 100)) for q in (50, 90, 99)},
    }


def tables() -> list[Table]:
    line, theirs = fitted_line(), published()["transfers"]
    columns = ["", *(name for kind in theirs for name in (kind, "report"))]
    seen = {kind: [figures(run(kind, line, seed)) for seed in SEEDS] for kind in theirs}

    def row(label: str, key: str, scale: float, digits: int) -> list[str]:
        cells = [label]
        for kind, runs in seen.items():
            cells += [interval([each[key] for each in runs]).text(scale, digits)]
            cells += [f"{theirs[kind][key] * scale:.{digits}f}"]
        return cells

    sizes = ["payload, MB, of 998 in 1,000"]
    for kind, runs in seen.items():
        low, high = (np.median([each[key] for each in runs]) for key in ("least", "most"))
        sizes += [f"{low / 1e6:.0f}–{high / 1e6:.0f}", "–".join(f"{end / 1e6:.0f}" for end in theirs[kind]["payload"])]
    rows = [
        sizes,
        row("latency P50, ms", "p50", 1e3, 0),
        row("latency P99, ms", "p99", 1e3, 0),
        row("mean queueing, ms", "queueing", 1e3, 0),
        row("connections in use, %", "pool", 1e2, 0),
    ]
    notes = [
        f"{len(SEEDS)} runs of {line.transfers} transfers each; in brackets, between which values 95 of 100 runs lie.",
    ]
    return [Table("KV transfers over 20 Gbit/s, 80 requests/s", columns, rows, notes)]
