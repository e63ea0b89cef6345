"""Sends a workload: open loop, whatever the answers take, or closed loop, one session after another ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from pdd_runtime.clock import now
from pdd_runtime.experiments.client import Client
from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.experiments.prompts import Prompts
from pdd_runtime.planner import Session, Workload

_AHEAD = 0.5
"""Seconds before its time in which a session's first prompt is made."""


class Load:
    """`outcomes` grows as requests end; their timelines come a little later."""

    def __init__(self, workload: Workload, prompts: Prompts, client: Client, on_end: Callable[[Outcome], None]) -> None:
        self.outcomes: list[Outcome] = []
        self._workload, self._prompts, self._client, self._on_end = workload, prompts, client, on_end

    async def run(self, sessions: Sequence[Session]) -> None:
        """Returns when every request has ended, well or not."""
        if users := min(self._workload.users, len(sessions)):
            waiting = iter(sessions)
            async with asyncio.TaskGroup() as group:
                for _ in range(users):
                    group.create_task(self._user(waiting))
            return
        begun = now() + _AHEAD
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                assert session.start is not None
                due = begun + session.start
                await _until(due - _AHEAD)
                group.create_task(self._session(session, due))

    async def _user(self, waiting: Iterable[Session]) -> None:
        for session in waiting:
            await self._session(session, None)

    async def _session(self, session: Session, due: float | None) -> None:
        """`due`: when its first turn is; None: as soon as it can be."""
        history: list[int] = []
        for number, turn in enumerate(session.turns):
            prompt = self._prompts.prompt(session, number, history)
            body = self._client.body(prompt, turn.output)
            # Making a long prompt takes milliseconds that are no graph's.
            due = now() if due is None else max(due, now()) if number else due
            await _until(due)
            outcome = Outcome(session.number, number, len(prompt), due, due)
            await self._client.ask(body, outcome)
            self.outcomes.append(outcome)
            self._on_end(outcome)
            history = prompt + outcome.tokens
            if number + 1 < len(session.turns):
                due = outcome.ended + session.turns[number + 1].think


async def _until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - now()))
