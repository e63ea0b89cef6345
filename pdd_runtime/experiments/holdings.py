"""What a graph holds for the requests that it has: nothing may be left of it when they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from pdd_runtime.clock import now
from pdd_runtime.errors import ConnectionLost, DeadlineExceeded
from pdd_runtime.experiments.client import Front
from pdd_runtime.observe import Vitals
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.plugins.messages import Empty
from pdd_runtime.testing.running_graph import RunningGraph

_LOADS = ("blocks_used", "sessions", "running", "waiting")
_LOOK_EVERY = 0.1
_ANSWER = 10.0


@dataclass(frozen=True)
class Leak:
    """More of something than there was before."""

    process: str
    what: str
    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.process}: {self.what} {self.before} → {self.after}"


@dataclass(frozen=True)
class Holdings:
    """At one moment."""

    loads: Mapping[str, Mapping[str, int]]
    """Of each worker that takes sessions: blocks in use, streams and requests."""
    sessions: int
    """In flight, of all frontends."""
    vitals: Mapping[str, Vitals]
    """Of each process that answered, by `pool/index`."""
    epochs: Mapping[str, str]
    """Of those processes: one that was started anew is not compared with the one before."""

    @staticmethod
    async def of(running: RunningGraph, front: Front) -> Holdings:
        """Now. Raises `httpx.HTTPError` where no frontend answers."""
        async with front.client(admin=True) as http:
            workers = (await http.get("/pdd/workers", timeout=_ANSWER)).raise_for_status().json()["workers"]
            metrics = (await http.get("/metrics", timeout=_ANSWER)).raise_for_status().text
        families = text_string_to_metric_families(metrics)
        sessions = sum(sample.value for one in families if one.name == "pdd_sessions" for sample in one.samples)
        found: dict[str, Vitals] = {}
        epochs: dict[str, str] = {}

        async def ask(member: Member) -> None:
            try:
                vitals = await running.ask(member, "process.vitals", Empty(), Vitals)
            except (ConnectionLost, DeadlineExceeded):
                return
            name = f"{member.key.pool}/{member.key.index}"
            found[name], epochs[name] = vitals, member.key.epoch

        async with asyncio.TaskGroup() as group:
            for member in running.members:
                group.create_task(ask(member))
        loads = {str(worker["worker"]): _load(worker["load"]) for worker in workers}
        return Holdings(loads, round(sessions), found, epochs)

    def leaks(self, before: Holdings, *, spare: int) -> tuple[Leak, ...]:
        """What is held now for requests, of which there are none, and what a process has more of than before; `spare`:
        so many more files and tasks are none, for connections come when they are first needed."""
        return (*self._held(), *self._grown(before, spare))

    def _held(self) -> Iterator[Leak]:
        if self.sessions:
            yield Leak("frontend", "sessions", 0, self.sessions)
        for worker, load in self.loads.items():
            yield from (Leak(worker, what, 0, count) for what, count in load.items() if count)

    def _grown(self, before: Holdings, spare: int) -> Iterator[Leak]:
        for process, vitals in self.vitals.items():
            if self.epochs[process] != before.epochs.get(process):
                continue
            earlier = before.vitals[process]
            for what in ("tasks", "files", "threads"):
                was, now_ = int(getattr(earlier, what)), int(getattr(vitals, what))
                if now_ > was + spare:
                    yield Leak(process, what, was, now_)


async def settled(
    running: RunningGraph, front: Front, before: Holdings | None = None, *, spare: int = 0, patience: float = 30.0
) -> tuple[Holdings, tuple[Leak, ...]]:
    """Wait until nothing is held, and no more than `before`; give what is held then, or after `patience` seconds, with
    what is too much of it. Raises `httpx.HTTPError` where no frontend answers at the end."""
    until = now() + patience
    while True:
        try:
            holdings = await Holdings.of(running, front)
            leaks = holdings.leaks(before or holdings, spare=spare)
        except httpx.HTTPError:
            if now() > until:
                raise
        else:
            if not leaks or now() > until:
                return holdings, leaks
        await asyncio.sleep(_LOOK_EVERY)


def _load(load: Mapping[str, Any]) -> dict[str, int]:
    return {name: int(load.get(name, 0)) for name in _LOADS}
