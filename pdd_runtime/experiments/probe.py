"""A worker's engine with a stopwatch: asked on its message plane, past frontend and driver."""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pdd_runtime.clock import now
from pdd_runtime.errors import EngineError
from pdd_runtime.ids import new_id
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.plugins.engine import (
    BlocksReady,
    DecodeEvent,
    DecodeRequest,
    EngineInfo,
    Extended,
    Load,
    PrefillEvent,
    PrefillRequest,
    Sampling,
    Tokens,
)
from pdd_runtime.plugins.messages import Empty, Fetched, FetchEvent, FetchRequest
from pdd_runtime.plugins.transport import TransferReport
from pdd_runtime.rpc import RpcConnection

_PATIENCE = 600.0
"""Seconds for one request: a long prompt on a slow machine."""
_GREEDY = Sampling(temperature=0.0)
_CALLS = 21


@dataclass(frozen=True)
class Computed:
    """Known tokens that a worker has computed."""

    seconds: float
    """From the request to the answer, less what a call takes that computes nothing."""
    new: int
    cached: int
    """Tokens before them whose KV was there."""
    chunk: int
    """The most tokens of a pass."""


class Probe:
    """One worker. It must have nothing else to do."""

    def __init__(self, member: Member, connection: RpcConnection, vocabulary: tuple[int, int], seed: int) -> None:
        """`vocabulary`: the first and the last id of the tokens it is asked with."""
        assert member.info is not None
        self.member, self.info, self.connection = member, member.info, connection
        self._first, self._count = vocabulary[0], vocabulary[1] - vocabulary[0] + 1
        self._random = random.Random(seed)
        # Nothing that was cached before is a hit.
        self.salt = new_id("profile")
        self.call = 0.0
        """Seconds of a call that computes nothing."""

    @property
    def pool(self) -> str:
        return self.member.key.pool

    @property
    def capacity(self) -> int:
        """Tokens of KV it holds."""
        return self.info.capacity_blocks * self.block

    @property
    def block(self) -> int:
        return self.info.layout.block_size

    async def time_calls(self) -> None:
        """Find out what a call takes."""
        times = []
        for _ in range(_CALLS):
            begun = now()
            await self.connection.call("engine.load", Empty(), Load, timeout=_PATIENCE)
            times.append(now() - begun)
        self.call = statistics.median(times)

    def draw(self, count: int) -> list[int]:
        """Tokens that nobody has seen."""
        return [self._first + self._random.randrange(self._count) for _ in range(count)]

    async def compute(self, tokens: Sequence[int]) -> Computed:
        """Have the KV of `tokens`: prefilled where that is the worker's role, else extended. Raises what it raises."""
        if self.member.role == "prefill":
            return await self._prefill(tokens)
        return await self._extend(tokens)

    async def steps(self, prompts: Sequence[Sequence[int]], count: int) -> float:
        """Seconds of a decode step of all `prompts` at once, about `count` steps behind them. Their KV should be there,
        so that they begin together. Raises what the worker raises."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._decode(prompt, count)) for prompt in prompts]
        answers = [task.result() for task in tasks]
        begun, ended = max(stamps[0] for stamps in answers), min(stamps[-1] for stamps in answers)
        gaps = [
            after - before
            for stamps in answers
            for before, after in pairwise(stamps)
            if before >= begun and after <= ended
        ]
        if not gaps:
            raise EngineError(
                f"{len(prompts)} requests were never decoded at once",
                where=str(self.member.key),
                why=f"the first had its {count} tokens before the last had one",
            )
        # Where several tokens come in one message their gaps are nothing: the mean is theirs, too.
        return statistics.median(gaps) or statistics.fmean(gaps)

    async def fetch(self, giver: Probe, transport: str, tokens: Sequence[int]) -> TransferReport:
        """Have the KV of `tokens` from a worker that has it. Raises what either raises."""
        request = FetchRequest(
            id=new_id("profile"),
            tokens=tuple(tokens),
            transport=transport,
            endpoint=giver.member.transports.get(transport, ""),
            epoch=giver.member.key.epoch,
            source=giver.pool,
            layout=giver.info.layout,
            salt=giver.salt,
            timeout=_PATIENCE,
        )
        async with self.connection.stream("kv.fetch", request, FetchEvent, timeout=_PATIENCE) as events:
            async for event in events:
                if isinstance(event, Fetched):
                    return event.report
        raise EngineError("a fetch ended without a report", where=str(self.member.key))

    async def _prefill(self, tokens: Sequence[int]) -> Computed:
        request = PrefillRequest(id=new_id("profile"), tokens=tuple(tokens), sampling=_GREEDY, salt=self.salt)
        begun = ended = now()
        cached = chunk = 0
        known: int | None = None
        async with self.connection.stream("engine.prefill", request, PrefillEvent, timeout=_PATIENCE) as events:
            async for event in events:
                match event:
                    case BlocksReady(ready, cached):
                        chunk = max(chunk, ready - (cached if known is None else known))
                        known = ready
                    case Tokens():
                        ended = now()
        return Computed(self._net(ended - begun), len(tokens) - cached, cached, max(1, chunk))

    async def _extend(self, tokens: Sequence[int]) -> Computed:
        begun = ended = now()
        extended = Extended(0, 0, 0)
        async with self.connection.stream(
            "engine.decode", self._request(tokens, 0), DecodeEvent, timeout=_PATIENCE
        ) as (events):
            async for event in events:
                if isinstance(event, Extended):
                    extended, ended = event, now()
        chunk = -(-extended.computed // max(1, extended.passes))
        return Computed(self._net(ended - begun), extended.computed, extended.cached, max(1, chunk))

    async def _decode(self, prompt: Sequence[int], count: int) -> list[float]:
        """When each of `count` tokens was there."""
        stamps: list[float] = []
        request = self._request(prompt, count)
        async with self.connection.stream("engine.decode", request, DecodeEvent, timeout=_PATIENCE) as events:
            async for event in events:
                if isinstance(event, Tokens):
                    stamps += [now()] * len(event.tokens)
        if not stamps:
            raise EngineError("it made no token", where=str(self.member.key))
        return stamps

    def _request(self, tokens: Sequence[int], count: int) -> DecodeRequest:
        return DecodeRequest(
            id=new_id("profile"),
            tokens=tuple(tokens),
            prompt_tokens=len(tokens),
            max_tokens=count,
            sampling=_GREEDY,
            salt=self.salt,
        )

    def _net(self, seconds: float) -> float:
        return max(0.0, seconds - self.call)


def same_engine(one: EngineInfo, other: EngineInfo) -> bool:
    """Whether what was measured of one holds for the other, if their pools are set alike."""
    return (one.fingerprint, one.layout, one.batch_limit) == (other.fingerprint, other.layout, other.batch_limit)
