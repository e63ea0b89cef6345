"""Changes the processes of a running graph one at a time, so that it serves all the while."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import groupby

from pdd_runtime.errors import LaunchError
from pdd_runtime.launch.child import Child, ChildSpec
from pdd_runtime.launch.crew import Crew
from pdd_runtime.launch.difference import Change
from pdd_runtime.launch.orders import Manner
from pdd_runtime.launch.slot import FRONTEND, Slot


class Roll:
    """One change, from its first step to its last, or to the first that fails: what was not yet touched then stays."""

    def __init__(
        self,
        crew: Crew,
        specs: Mapping[Slot, ChildSpec],
        manner: Manner,
        *,
        ready: Callable[[Child], bool],
        until: Callable[[Callable[[], bool]], Awaitable[None]],
        met: Callable[[Child], Awaitable[None]],
        say: Callable[[str], None],
    ) -> None:
        """`specs`: what is started, by its place. `until(condition)` returns when it holds; `met(child)` when all know
        the worker who know others of its pool."""
        self._crew, self._specs, self._manner = crew, specs, manner
        self._ready, self._until, self._met, self._say = ready, until, met, say

    async def run(self, changes: Sequence[Change]) -> None:
        """Raises `LaunchError` where a process does not become ready."""
        for kind, group in groupby(changes, key=lambda change: (change.kind, change.pool)):
            slots = [change.slot for change in group]
            match kind[0]:
                case "add":
                    await self._add(slots)
                case "replace":
                    for slot in slots:
                        await self._replace(slot)
                case "remove":
                    await self._remove(slots)

    async def _add(self, slots: Sequence[Slot]) -> None:
        """All of a pool at once."""
        self._say(f"{_named(slots)}: starts")
        children = [self._crew.start(self._specs[slot], late=True) for slot in slots]
        for child in children:
            await self._becomes_ready(child, "it is tried again, and again; `pdd-runtime logs` shows what it says")
            self._say(f"{child.spec}: is ready")

    async def _remove(self, slots: Sequence[Slot]) -> None:
        """All of a pool at once."""
        children = [child for slot in slots if (child := self._crew.at(slot))]
        self._say(f"{_named(slots)}: drains")
        await self._end(children)
        self._say(f"{_named(slots)}: is gone")

    async def _replace(self, slot: Slot) -> None:
        old = self._crew.at(slot)
        beside = self._manner.surge
        if beside is None:
            beside = slot.pool == FRONTEND or self._alone(slot)
        if old is None or not beside:
            await self._replace_in_its_place(slot, old)
        else:
            await self._replace_beside(slot, old)
        self._say(f"{slot}: is replaced")

    async def _replace_beside(self, slot: Slot, old: Child) -> None:
        self._say(f"{slot}: starts a replacement beside it")
        new = self._crew.start(self._specs[slot], replaces=True, late=True)
        try:
            await self._becomes_ready(
                new,
                f"what ran before runs on. Where there is no room for two, add --no-surge: {slot} is then drained "
                "first, and its pool has one process less until the new one is ready",
            )
        except BaseException:
            new.kill()
            await self._crew.end([new])
            self._crew.forget(new)
            raise
        new.replaces = False
        self._say(f"{slot}: drains, its replacement is ready")
        await self._end([old])

    async def _replace_in_its_place(self, slot: Slot, old: Child | None) -> None:
        if old is not None:
            without = ": its pool is without until its replacement is ready" if self._alone(slot) else ""
            self._say(f"{slot}: drains{without}")
            await self._end([old])
        self._say(f"{slot}: starts")
        new = self._crew.start(self._specs[slot], late=True)
        await self._becomes_ready(new, "nothing else was touched; correct it, and apply the graph again with `up -d`")

    async def _becomes_ready(self, child: Child, fix: str) -> None:
        """Raises `LaunchError`, which says what keeps it."""
        why = ""
        try:
            async with asyncio.timeout(self._manner.start):
                await self._until(lambda: self._ready(child) or child.ended or child.restarts > 0)
        except TimeoutError:
            why = f"it still starts after {self._manner.start:g} s: {child.status(None).note}"
        if why or not self._ready(child):
            why = why or child.reason or "it was told to end"
            raise LaunchError(f"{child.spec} does not become ready", where=str(child.log.path), why=why, fix=fix)
        await self._met(child)

    async def _end(self, children: Sequence[Child]) -> None:
        if not await self._crew.end(children, self._manner.patience):
            self._say(f"{_named([child.spec.slot for child in children])}: had to be ended")
        for child in children:
            self._crew.forget(child)

    def _alone(self, slot: Slot) -> bool:
        others = (child for child in self._crew.children if child.spec.pool == slot.pool and child.spec.slot != slot)
        return not any(self._ready(child) for child in others)


def _named(slots: Sequence[Slot]) -> str:
    return ", ".join(map(str, slots))
