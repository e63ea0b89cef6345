"""Streams over a graph while faults are made in it, each compared with what it is undisturbed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import count, islice
from types import TracebackType
from typing import Any, Protocol, Self

from pdd_runtime.clock import now
from pdd_runtime.errors import PddError
from pdd_runtime.experiments.client import Client, Front
from pdd_runtime.experiments.outcome import Outcome
from pdd_runtime.experiments.prompts import Prompts
from pdd_runtime.ids import new_id
from pdd_runtime.planner.workload import Workload
from pdd_runtime.testing.faults import Fault

_SETTLING = 1.0
"""Seconds for the transfers of an answer: of those that a fault has ended, no end may be told."""
_AGAIN = 0.2
"""Seconds before a request that was refused is sent again."""


@dataclass(frozen=True)
class Asked:
    """One of the requests that are sent again and again."""

    number: int
    tokens: tuple[int, ...]
    output: int
    seed: int | None
    """None: greedy."""


@dataclass
class Stream:
    """One answer."""

    asked: Asked
    outcome: Outcome
    refused: int = 0
    """How often it was refused before, with an answer that says to come back."""

    @property
    def gap(self) -> float:
        """Seconds between two tokens, the longest."""
        return self._waited(self.gap_at) if self.gap_at else 0.0

    @property
    def gap_at(self) -> int:
        """The position of the token that ended it."""
        return max(range(1, len(self.outcome.stamps)), key=self._waited, default=0)

    def _waited(self, position: int) -> float:
        return self.outcome.stamps[position] - self.outcome.stamps[position - 1]

    def deviation(self, wanted: Sequence[int]) -> int | None:
        """The first position at which its tokens are others than those; of one that ended in an error, as far as it
        came. None: there is none."""
        got = self.outcome.tokens
        for position, (a, b) in enumerate(zip(got, wanted, strict=False)):
            if a != b:
                return position
        whole = self.outcome.error is None
        return min(len(got), len(wanted)) if len(got) > len(wanted) or (whole and len(got) < len(wanted)) else None


@dataclass
class Made:
    """A fault as it was made. Times are those of `pdd_runtime.clock`."""

    fault: Fault
    at: float
    ended: float | None = None
    struck: tuple[str, ...] = ()
    """Processes, `pool/index`."""
    error: str = ""
    """Why it could not be made."""


class Maker(Protocol):
    """Makes a fault, and says whom it struck."""

    async def __call__(self, fault: Fault) -> Sequence[object]: ...


class Strikes:
    """The faults of one storm."""

    def __init__(self, make: Maker, group: asyncio.TaskGroup, stop: asyncio.Event) -> None:
        self.made: list[Made] = []
        self.begun = now()
        self._make, self._group, self._stop = make, group, stop

    def begin(self, fault: Fault) -> asyncio.Task[None]:
        """Make it now; the task ends when it is over, whether it could be made or not."""
        made = Made(fault, now())
        self.made.append(made)
        return self._group.create_task(self._strike(made))

    async def pause(self, seconds: float) -> bool:
        """False: the storm is to end meanwhile."""
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return True
        return False

    async def _strike(self, made: Made) -> None:
        try:
            made.struck = tuple(str(process) for process in await self._make(made.fault))
        except (PddError, OSError) as error:
            made.error = str(error)
        made.ended = now()


Script = Callable[[Strikes], Coroutine[Any, Any, None]]
"""Makes faults, one after the other or beside each other."""


def following(faults: Sequence[Fault]) -> Script:
    """Each at its time."""

    async def script(strikes: Strikes) -> None:
        for fault in faults:
            if not await strikes.pause(strikes.begun + fault.at - now()):
                return
            strikes.begin(fault)

    return script


def asked(workload: Workload, streams: int, seed: int) -> tuple[Asked, ...]:
    """Two for each stream, so that those beside each other differ: every other one is greedy, the rest are seeded."""
    prompts = Prompts(workload, seed)
    return tuple(
        Asked(
            session.number,
            tuple(prompts.prompt(session, 0, ())),
            session.turns[0].output,
            seed + session.number if session.number % 2 else None,
        )
        for session in islice(workload.stream(seed), 2 * streams)
    )


class Storm:
    """Sends `requests` in turn over so many `streams` at once. Use it as a context manager: leaving it waits for the
    timelines that are still to come."""

    def __init__(self, url: str, front: Front, requests: Sequence[Asked], streams: int, timeout: float) -> None:
        """`timeout`: seconds of one answer."""
        self._requests, self._streams, self._timeout = requests, streams, timeout
        self._client = Client(url, timeout, new_id("chaos"), front, _SETTLING)
        self.on_end: Callable[[Stream], None] = lambda stream: None
        self.ended: list[Stream] = []
        """Of `rage`; it grows as they end."""

    async def __aenter__(self) -> Self:
        """Raises `RemoteError` where nobody answers at the URL."""
        await self._client.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.__aexit__(kind, error, trace)

    async def each_once(self) -> list[Stream]:
        """Every request, with caches that know none of them."""
        salt = new_id("chaos")
        waiting = iter(self._requests)
        streams: list[Stream] = []

        async def user() -> None:
            for one in waiting:
                streams.append(await self._ask(one, salt))

        async with asyncio.TaskGroup() as group:
            for _ in range(self._streams):
                group.create_task(user())
        return streams

    async def rage(self, script: Script, make: Maker, until: float, stop: asyncio.Event) -> list[Made]:
        """Requests one after the other on every stream, and the faults that `script` makes, until `until` or `stop`;
        returns when all streams have ended, and all faults are over."""
        numbers, shared = count(), new_id("chaos")

        async def user() -> None:
            while now() < until and not stop.is_set():
                number = next(numbers)
                one = self._requests[number % len(self._requests)]
                # Of three, two find no cache, and one what those before it have left: so all routes are taken.
                salt = shared if number % 3 == 2 else new_id("chaos")
                stream = await self._ask(one, salt)
                self.ended.append(stream)
                self.on_end(stream)

        async with asyncio.TaskGroup() as group:
            strikes = Strikes(make, group, stop)
            for _ in range(self._streams):
                group.create_task(user())
            group.create_task(script(strikes))
        return strikes.made

    async def _ask(self, one: Asked, salt: str) -> Stream:
        """One answer. A request that is refused before it was begun is sent again, as clients do."""
        body = self._client.body(one.tokens, one.output, seed=one.seed, salt=salt)
        begun, refused = now(), 0
        while True:
            outcome = Outcome(one.number, 0, len(one.tokens), begun, begun)
            await self._client.ask(body, outcome)
            if not outcome.refused or now() > begun + self._timeout:
                return Stream(one, outcome, refused)
            refused += 1
            await asyncio.sleep(_AGAIN)
