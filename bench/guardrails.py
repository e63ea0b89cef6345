"""Do the guardrails of live A/B roll back what is worse, and nothing else? `python bench/guardrails.py`.

Requests that arrive at random are split evenly between two variants, each with servers of its own; their times vary as
those of answers do (lognormal), and, where there are few servers, as those do that wait for each other. The guardrails
are the default ones, and look every ten seconds.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from typing import NamedTuple

from pdd_runtime.graph import Guardrails
from pdd_runtime.observe.pace import Pace
from pdd_runtime.observe.tally import Tallies
from pdd_runtime.pipeline.comparison import worse

RAILS = Guardrails()
LOOK = 10.0


class Case(NamedTuple):
    name: str
    rate: float
    """Requests a second, of both together."""
    servers: int
    """Of each."""
    slower: float = 1.0
    """The variant's times over the control's."""
    failing: float = 0.0
    """Share of the variant's requests."""
    spread: float = 1.0
    """Of the logarithm of times, whose mean is a second."""


CASES = (
    Case("the same, no waiting", 2, 1000),
    Case("the same, 4 servers at 70 %", 5.6, 4),
    Case("the same, 4 servers at 90 %", 7.2, 4),
    Case("the same, 1 server at 80 %", 1.6, 1),
    Case("half as slow again", 2, 1000, slower=1.5),
    Case("twice as slow", 2, 1000, slower=2.0),
    Case("twice as slow, times alike", 2, 1000, slower=2.0, spread=0.3),
    Case("2 of 100 fail", 2, 1000, failing=0.02),
    Case("10 of 100 fail", 2, 1000, failing=0.1),
    Case("half of them fail", 2, 1000, failing=0.5),
)


def rolled_back(case: Case, hours: float, seed: int) -> float | None:
    """After how many seconds; None: not at all."""
    draw, at = random.Random(seed), 0.0
    tallies = {name: Tallies(RAILS.window, lambda: at) for name in ("control", "variant")}
    free = {name: [0.0] * case.servers for name in tallies}
    under_way: list[tuple[float, str, float]] = []
    arrival, look = 0.0, LOOK
    while arrival < hours * 3600:
        arrival += draw.expovariate(case.rate)
        name = draw.choice(("control", "variant"))
        takes = draw.lognormvariate(-(case.spread**2) / 2, case.spread) * (case.slower if name == "variant" else 1.0)
        ends = max(arrival, heapq.heappop(free[name])) + takes
        heapq.heappush(free[name], ends)
        heapq.heappush(under_way, (ends, name, ends - arrival))
        while under_way[0][0] <= arrival:
            end, ended, seconds = heapq.heappop(under_way)
            while look <= end:
                at = look
                if worse(RAILS, tallies["control"].seen().late, tallies["variant"].seen().late):
                    return look
                look += LOOK
            at = end
            pace = Pace(0.0)
            pace.sent(1, seconds)
            failed = ended == "variant" and draw.random() < case.failing
            tallies[ended].saw(500 if failed else 200, seconds, pace, False, None)
            if not under_way:
                break
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0, help="of each experiment")
    parser.add_argument("--seeds", type=int, default=10, help="experiments of each case")
    options = parser.parse_args()
    print(f"{options.seeds} experiments of {options.hours:g} h each; the median of those that were rolled back")
    print("| the variant is | requests/s | rolled back | after, min |\n|---|---|---|---|")
    for case in CASES:
        found = [rolled_back(case, options.hours, seed) for seed in range(options.seeds)]
        times = [seconds / 60 for seconds in found if seconds is not None]
        after = f"{statistics.median(times):.1f}" if times else "–"
        print(f"| {case.name} | {case.rate:g} | {len(times)} of {len(found)} | {after} |", flush=True)


if __name__ == "__main__":
    main()
