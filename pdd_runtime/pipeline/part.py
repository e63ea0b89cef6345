"""A part of a session: what is done with some workers, and ends as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pdd_runtime.errors import EngineError, PddError, WorkerLost, leaves
from pdd_runtime.pipeline import deadlines
from pdd_runtime.pipeline.kept import Kept
from pdd_runtime.pipeline.kv import Held, bring
from pdd_runtime.pipeline.legs import Leg
from pdd_runtime.pipeline.peers import Peer
from pdd_runtime.pipeline.recovery import worker_lost
from pdd_runtime.pipeline.token_log import Source
from pdd_runtime.plugins.engine import (
    BlocksReady,
    DecodeEvent,
    DecodeRequest,
    Extended,
    PrefillEvent,
    PrefillRequest,
    Stopped,
    Token,
    Tokens,
)

if TYPE_CHECKING:
    from pdd_runtime.pipeline.session import Session


class Part:
    """The steps that flows are made of; their order is the flow's. All of it runs in one task group, so that whatever
    ends it (the end, an error, the client) ends every step of it, and `run` then closes every leg."""

    def __init__(self, session: Session) -> None:
        self.session, self.id = session, session.part_id
        self._legs: list[Leg[Any]] = []
        self._kept: dict[Leg[Any], Kept] = {}
        """What decodes that are assisted still read."""
        self._doing: dict[Peer, str] = {}
        self._tasks = asyncio.TaskGroup()
        self._beside: list[asyncio.Task[None]] = []

    # Its life

    async def run(self, flow: Coroutine[Any, Any, None]) -> None:
        """Go through `flow`. Raises the one error that explains the others."""
        # A task of its own: a task group that is cancelled and has an error raises that, and the cancellation is lost.
        work = asyncio.create_task(self._run(flow))
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait({work})
            if not work.cancelled():
                work.exception()
            raise
        work.result()

    async def _run(self, flow: Coroutine[Any, Any, None]) -> None:
        try:
            async with self._tasks:
                await flow
                for task in self._beside:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _cause(group) from None
        finally:
            for leg in reversed(self._legs):  # who reads goes before who gives
                await leg.close()

    def start(self, step: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a step beside the others; it ends with the part, and the part with its error."""
        return self._tasks.create_task(step)

    def beside(self, step: Coroutine[Any, Any, None]) -> None:
        """Run a step that the part does not wait for: it ends with the flow at the latest."""
        self._beside.append(self._tasks.create_task(step))

    def needs(self, role: Source) -> None:
        """From here on the part ends with `WorkerLost` as soon as that worker is lost, whoever waits for what."""
        peer = self.session.crew[role]

        async def watch() -> None:
            kind = await self.session.gone(peer, role)
            raise worker_lost(peer, self._doing.get(peer, "the request waited for it"), kind=kind)

        self.beside(watch())

    @contextmanager
    def guarding(self, leg: Leg[Any], peer: Peer, role: Source, doing: str) -> Iterator[None]:
        """Inside, who reads the leg gets `WorkerLost` as soon as `peer`, in that role, is lost."""

        async def watch() -> None:
            leg.fail(worker_lost(peer, doing, kind=await self.session.gone(peer, role)))

        guard = self._tasks.create_task(watch())
        try:
            yield
        finally:
            guard.cancel()

    # Steps

    async def prefill(self) -> None:
        """The prompt's KV is made on the prefill worker, and the first token."""
        session, peer = self.session, self.session.crew["prefill"]
        request = PrefillRequest(
            id=self.id, tokens=session.prompt, sampling=session.request.sampling, salt=session.request.salt
        )
        leg: Leg[PrefillEvent] = self.leg(
            peer, "prefilling the prompt", "engine.prefill", request, PrefillEvent, deadlines.PREFILL
        )
        session.timeline.event(peer, "prefill starts")
        try:
            with self.guarding(leg, peer, "prefill", leg.doing):
                async for event in leg:
                    match event:
                        case BlocksReady(tokens, cached):
                            session.cached_tokens = session.timeline.cached.prefill = cached
                            if tokens == len(session.prompt):
                                session.timeline.event(peer, f"prefill ends: {tokens} tokens, {cached} of them cached")
                        case Tokens(made):
                            session.timeline.event(peer, "first token")
                            session.accept(made, "prefill")
        except PddError:
            if not session.log:
                raise
            # All that was asked of it is here; who still reads its KV sees for himself.
        if not session.log:
            raise leg.ended("a token")
        session.crew.release("prefill")

    async def fetch(self, source: Source, target: Source, tokens: tuple[int, ...]) -> tuple[Held, int]:
        """Bring the KV of `tokens` from worker to worker. Returns what keeps it there until it is closed, and how many
        leading tokens' KV is there; that is less where it cannot be moved, and the engine gets it by itself."""
        return await bring(self, source, target, tokens)

    async def decode(
        self, role: Source, doing: str, known: int, max_tokens: int, *, hold: bool = False, suffix: str = ""
    ) -> tuple[Leg[DecodeEvent], Extended]:
        """Have a worker go on behind the prompt and the first `known` output tokens. Returns when it has their KV; its
        tokens are then to be read from the leg. `suffix` tells a second request of this session on one worker from
        the first."""
        leg = await self.open_decode(role, doing, known, max_tokens, hold=hold, suffix=suffix)
        return leg, await self.extended(leg)

    async def open_decode(
        self, role: Source, doing: str, known: int, max_tokens: int, *, hold: bool = False, suffix: str = ""
    ) -> Leg[DecodeEvent]:
        """The first half of `decode`: the worker has been asked."""
        session, peer = self.session, self.session.crew[role]
        tokens, id = session.prompt + session.log.ids[:known], self.id + suffix
        kept = await self.keep(session.crew["prefill"], peer, tokens, id) if peer.assisted else None
        request = DecodeRequest(
            id=id,
            tokens=tokens,
            prompt_tokens=len(session.prompt),
            max_tokens=max_tokens,
            sampling=session.request.sampling,
            salt=session.request.salt,
            hold=hold,
            offer=await kept.offer() if kept else None,
        )
        leg: Leg[DecodeEvent] = self.leg(peer, doing, "engine.decode", request, DecodeEvent, deadlines.EXTEND)
        if kept is not None:
            self._kept[leg] = kept
            kept.mind(leg)
        await leg.open()
        return leg

    async def keep(self, giver: Peer, taker: Peer, tokens: tuple[int, ...], id: str) -> Kept:
        """Native KV: prefill keeps that of `tokens` for the taker's request `id`. It is asked when it has made the
        first token, so that it has the prompt's KV."""
        session = self.session
        await session.until(lambda: len(session.log) > 0, "the first token")
        return Kept(self, giver, taker, tokens, id)

    async def extended(self, leg: Leg[DecodeEvent]) -> Extended:
        """The second half: the worker has the KV of all it was told."""
        kept = self._kept.pop(leg, None)
        try:
            async for event in leg:
                if isinstance(event, Extended):
                    leg.patience = deadlines.TOKEN
                    if kept is not None:
                        kept.read(event.cached - event.received, event.received)
                    return event
        except EngineError as error:
            if kept is None:
                raise
            raise await kept.cause(error) from error
        raise leg.ended("a beginning")

    async def follow(self, leg: Leg[DecodeEvent], take: Callable[[tuple[Token, ...]], None]) -> Stopped:
        """Give a decode's tokens to `take` until it stops."""
        session = self.session
        stopped: Stopped | None = None

        def heard(event: DecodeEvent) -> bool:
            nonlocal stopped
            if isinstance(event, Tokens):
                take(event.tokens)
                return session.cut
            if isinstance(event, Stopped):
                stopped = event
            return stopped is not None

        if not await leg.feed(heard):
            raise leg.ended("a stop")
        if stopped is None:
            await leg.close()
            return Stopped("stop", len(session.prompt) + len(session.log))
        return stopped

    async def answer(self, leg: Leg[DecodeEvent], begun: Callable[[], None] | None = None) -> None:
        """Main's tokens go to the user until the end of the answer; `begun` is called once the first ones are out."""
        session = self.session

        def take(tokens: tuple[Token, ...]) -> None:
            nonlocal begun
            first, begun = begun, None
            session.accept(tokens, "main")
            if first is not None:
                first()

        stopped = await self.follow(leg, take)
        session.timeline.event(leg.peer, f"main stops: {stopped.reason}")
        # Usually the last token said so already; not where the engine ends it by itself, as at its context length.
        session.end("stop" if stopped.reason == "stop" else "length")

    async def settle(self, known: int, suffix: str = "") -> None:
        """Main gets the KV of a request that was finished without it: the next turn of the conversation finds it
        there, so that main's hit rate stays that of prefill."""
        leg, extended = await self.decode("main", "settling", known, 0, suffix=suffix)
        await leg.close()
        self.session.timeline.event(leg.peer, f"settled: {extended.computed} tokens computed")

    def leg(self, peer: Peer, doing: str, method: str, request: object, event: Any, patience: float) -> Leg[Any]:
        """A stream on a worker, which is closed with the part at the latest."""
        self._doing[peer] = doing
        leg: Leg[Any] = Leg(peer, doing, peer.connection.stream(method, request, event, timeout=None), patience)
        self._legs.append(leg)
        return leg


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error to tell: a lost worker explains the others; of errors that are ours, the first."""
    errors = list(leaves(group))
    return min(errors, key=lambda error: (not isinstance(error, WorkerLost), not isinstance(error, PddError)))
