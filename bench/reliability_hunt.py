"""Which state a session is in, and how to strike while one is in it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdd_runtime.cli.front import Front
from pdd_runtime.clock import now
from pdd_runtime.experiments.chaos_report import Seen
from pdd_runtime.graph import Graph

STATES = ("queued", "prefilling", "transferring", "relaying", "sealing", "draining", "main")
"""A request with a relay goes through them in this order; it is transferring while KV is under way to relay or main, so
also while it relays."""
_MARKS = {
    "route": "queued",
    "prefill starts": "prefilling",
    "first token": "transferring",
    "relay starts": "relaying",
    "seal": "sealing",
    "relay stops": "draining",
    "commit": "main",
}


def states_at(body: Mapping[str, Any], time: float = float("inf")) -> set[str]:
    """The states of a session at `time` on its timeline; none: it has ended, or was not there."""
    state = ""
    for event in body["events"]:
        if event["t"] > time:
            break
        word = str(event["what"]).partition(":")[0]
        if word in ("finish", "cancelled", "error"):
            return set()
        if word == "main starts" and body["route"] != "P-RLD-MD":
            state = "main"
        elif word == "queued":
            state = "queued"
        # A part that is begun anew after a loss is no step back for the user.
        elif word in _MARKS and (not state or STATES.index(_MARKS[word]) >= STATES.index(state)):
            state = _MARKS[word]
    if state in ("", "queued", "prefilling"):
        return {state} - {""}
    under_way = any(
        one["started"] <= time and (one["finished"] is None or one["finished"] > time) for one in body["kv"]
    )
    return {state} - {"transferring"} | ({"transferring"} if under_way else set())


def workers_at(body: Mapping[str, Any], time: float = float("inf")) -> set[str]:
    """Those that had a part in it until then."""
    return {event["worker"] for event in body["events"] if event["worker"] and event["t"] <= time}


class Hunt:
    """Looks for sessions by what the frontend tells of them."""

    def __init__(self, front: Front, graph: Graph) -> None:
        self._front = front
        self._roles = {name: pool.role for name, pool in graph.spec.pools.items()}

    async def find(self, role: str, state: str, chance: random.Random, within: float) -> str | None:
        """Wait until a session is in `state`, and a random moment more; give a worker of `role` that has a part in it.
        None: there was none in that time."""
        until = now() + within
        async with self._front.client(admin=True) as http:
            while now() < until:
                running = (await http.get("/pdd/requests")).json()["requests"]
                for line in [line for line in running if line["status"] is None]:
                    worker = await self._follow(http, line["id"], role, state, until)
                    if worker is not None:
                        if state not in ("sealing", "draining"):
                            await asyncio.sleep(chance.uniform(0.0, 0.02))
                        return worker
                await asyncio.sleep(chance.uniform(0.0, 0.02))
        return None

    async def _follow(self, http: Any, id: str, role: str, state: str, until: float) -> str | None:
        """One session, for as long as it may still come to the state."""
        while now() < until:
            answer = await http.get(f"/pdd/requests/{id}")
            if not answer.is_success:
                return None
            body = answer.json()
            found = states_at(body)
            if body["finish_reason"] or body["error"] or min(map(STATES.index, found), default=0) > STATES.index(state):
                return None
            # A seal is over in milliseconds, and comes as soon as main has the KV.
            soon = state == "sealing" and "relaying" in found and "transferring" not in found
            if state in found or soon:
                mine = [name for name in workers_at(body) if self._roles[name.partition("/")[0]] == role]
                return mine[0] if mine else ""
        return None


@dataclass
class Meeting:
    """What came of the kills of a role that met a session in a state."""

    role: str
    state: str
    kills: int = 0
    streams: int = 0
    same: int = 0
    gap: float = 0.0
    """The longest of those streams, in seconds."""


def meetings(seen: Seen, graph: Graph) -> list[Meeting]:
    """Which streams each kill met, and in which state."""
    roles = {name: pool.role for name, pool in graph.spec.pools.items()}
    rows = {(role, state): Meeting(role, state) for role in dict.fromkeys(roles.values()) for state in STATES}
    for made in seen.made:
        for role in {roles[name.partition("/")[0]] for name in made.struck}:
            met: dict[str, list[Any]] = {}
            for stream in seen.streams:
                at = made.at - stream.outcome.sent
                body = stream.outcome.timeline
                if body is None or not 0 <= at <= stream.outcome.ended - stream.outcome.sent:
                    continue
                for state in states_at(body, at):
                    # Of one that waits, nobody is struck: whoever it would have taken is.
                    if state == "queued" or workers_at(body, at) & set(made.struck):
                        met.setdefault(state, []).append(stream)
            for state, streams in met.items():
                row = rows[role, state]
                row.kills += 1
                row.streams += len(streams)
                row.same += sum(not wrong(seen, stream) for stream in streams)
                row.gap = max(row.gap, *(stream.gap for stream in streams))
    return list(rows.values())


def wrong(seen: Seen, stream: Any) -> bool:
    """It ended in an error, or has other tokens than undisturbed."""
    wanted: Sequence[int] = seen.wanted[stream.asked.number]
    return stream.outcome.error is not None or stream.deviation(wanted) is not None
