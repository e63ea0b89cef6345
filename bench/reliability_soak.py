"""Many requests, and many that are given up at random moments: nothing may be left of them."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from contextlib import suppress

from pdd_runtime.cli.front import Front
from pdd_runtime.clock import now
from pdd_runtime.experiments.chaos import SPARE
from pdd_runtime.experiments.client import Client
from pdd_runtime.experiments.holdings import Holdings, settled
from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.experiments.storm import asked
from pdd_runtime.ids import new_id
from pdd_runtime.planner import read_workload
from pdd_runtime.testing.faults import RunningGraph

GROWTH = 1.10
"""Of resident memory, over what it is when caches and the list of timelines are full."""
FIRST = 1_200
"""Requests before the first count: more than a frontend remembers."""
LONGEST = 2.0
"""Seconds after which a request is given up, at most."""


async def soak(running: RunningGraph, front: Front, options: argparse.Namespace) -> bool:
    """Whether all was as before in the end."""
    chance = random.Random(f"{options.seed}/soak")
    workload = read_workload(options.workload)
    requests = asked(workload, options.streams, options.seed)
    answered = failed = given_up = 0

    async def ask(client: Client, number: int, patience: float | None) -> None:
        nonlocal answered, failed, given_up
        one = requests[number % len(requests)]
        body = client.body(one.tokens, one.output, seed=one.seed, salt=new_id("soak") if number % 3 else "")
        outcome = Outcome(one.number, 0, len(one.tokens), now(), now())
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await client.ask(body, outcome)
        if not outcome.ended:
            given_up += 1
        elif outcome.error is None:
            answered += 1
        else:
            failed += 1
            print(f"{outcome.request_id}: {outcome.error}", file=sys.stderr)

    async def many(patiences: list[float | None]) -> None:
        waiting = iter(enumerate(patiences))

        async def user(client: Client) -> None:
            for number, patience in waiting:
                await ask(client, number, patience)
                if number % 500 == 499:
                    print(f"{number + 1} of {len(patiences)}", file=sys.stderr)

        # Timelines are not looked at: that would be as many requests again.
        client = Client(running.url, workload.timeout, new_id("soak"), front, settling=0.0)
        async with client, asyncio.TaskGroup() as group:
            for _ in range(options.streams):
                group.create_task(user(client))

    print("warming up", file=sys.stderr)
    await many([None] * min(FIRST, options.requests))
    before, _ = await settled(running, front)
    answered = failed = given_up = 0
    rest: list[float | None] = [None] * options.requests
    # A moment that may be before the first token, in the middle, or after the end.
    rest += [chance.uniform(0.0, LONGEST) for _ in range(options.aborts)]
    chance.shuffle(rest)
    begun = now()
    await many(rest)
    seconds = now() - begun
    after, leaks = await settled(running, front, before, spare=SPARE, patience=60.0)
    grown = {name for name, (was, is_) in _memory(before, after).items() if is_ > GROWTH * was + (8 << 20)}
    tell(options, before, after, {"answered": answered, "failed": failed, "given_up": given_up, "seconds": seconds})
    for leak in leaks:
        print(f"left behind: {leak}", file=sys.stderr)
    for name in sorted(grown):
        print(f"{name} has grown", file=sys.stderr)
    return not leaks and not grown and not failed


def _memory(before: Holdings, after: Holdings) -> dict[str, tuple[int, int]]:
    return {
        name: (before.vitals[name].memory, vitals.memory)
        for name, vitals in after.vitals.items()
        if name in before.vitals
    }


def tell(options: argparse.Namespace, before: Holdings, after: Holdings, counts: dict[str, float]) -> None:
    rows = []
    for name, vitals in sorted(after.vitals.items()):
        was, load = before.vitals[name], after.loads.get(name, {})
        row: dict[str, object] = {"process": name, "blocks": load.get("blocks_used", 0)}
        row["sessions"] = load.get("sessions", after.sessions if name.startswith("frontend") else 0)
        for what in ("tasks", "files", "threads"):
            row[what] = (getattr(was, what), getattr(vitals, what))
        row["memory"] = (was.memory, vitals.memory)
        rows.append(row)
    if options.format == "json":
        print(json.dumps({**counts, "processes": rows}, indent=2))
        return
    told = ", ".join(f"{int(counts[key])} {key.replace('_', ' ')}" for key in ("answered", "given_up", "failed"))
    print(f"{told}, in {counts['seconds']:.0f} s")
    print(f"{'process':<12}{'blocks':>7}{'sessions':>9}{'tasks':>12}{'files':>12}{'threads':>12}{'MB':>14}")
    for row in rows:
        cells = [f"{row[what][0]} → {row[what][1]}" for what in ("tasks", "files", "threads")]  # type: ignore[index]
        mega = " → ".join(f"{size / 1e6:.0f}" for size in row["memory"])  # type: ignore[attr-defined]
        print(
            f"{row['process']:<12}{row['blocks']:>7}{row['sessions']:>9}"
            + "".join(f"{cell:>12}" for cell in cells)
            + f"{mega:>14}"
        )
