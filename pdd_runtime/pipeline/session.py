"""One request in flight: its token log, its workers, and the steps that every route is made of."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from pdd_runtime.errors import EngineError, PddError, WorkerLost, leaves
from pdd_runtime.observe import Timeline
from pdd_runtime.pipeline import deadlines
from pdd_runtime.pipeline.edges import Edges
from pdd_runtime.pipeline.kept import Kept
from pdd_runtime.pipeline.kv import Held, bring
from pdd_runtime.pipeline.legs import Leg, worker_lost
from pdd_runtime.pipeline.output import Output
from pdd_runtime.pipeline.peers import Peer
from pdd_runtime.pipeline.pulse import Pulse
from pdd_runtime.pipeline.request import Finish, SessionRequest
from pdd_runtime.pipeline.token_log import Source, TokenLog
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

log = logging.getLogger(__name__)

Flow = Callable[["Session"], Awaitable[None]]
"""What one kind of route does with a session, from its first step to its last."""


class Session:
    """State and steps; the order of the steps is the flow's. All of it runs in one task group, so that whatever ends
    it (the end, an error, the client) ends every part of it, and `run` then closes every leg."""

    def __init__(self, request: SessionRequest, workers: Mapping[Source, Peer], edges: Edges, timeline: Timeline):
        """`workers` by role; an aggregated worker stands as main."""
        self.request, self.timeline = request, timeline
        self.id, self.prompt = request.id, request.tokens
        self.log = TokenLog(len(request.tokens))
        self.output = Output()
        self.finish: Finish | None = None
        """The user has the whole answer."""
        self.cut = False
        """The user had enough before the model had: workers that still decode for it are stopped."""
        self.cached_tokens = 0
        """Prompt tokens that were cached where the prompt was computed."""
        self.last_token_at = 0.0
        """When the user was given the last token, in seconds from arrival."""
        self.changed = Pulse()
        self.workers = dict(workers)
        self.edges = edges
        """Which pool feeds which, and how."""
        self._occupied = dict(workers)
        self._legs: list[Leg[Any]] = []
        self._kept: dict[Leg[Any], Kept] = {}
        """What decodes that are assisted still read."""
        self._doing: dict[Source, str] = {}
        self._tasks = asyncio.TaskGroup()
        self._beside: list[asyncio.Task[None]] = []
        for peer in self._occupied.values():
            peer.sessions += 1

    # Its life

    async def run(self, flow: Flow) -> None:
        """Go through `flow`. What goes wrong is told to the user through `output`, and to the timeline."""
        error: BaseException | None = None
        try:
            async with self._tasks:
                await flow(self)
                for task in self._beside:
                    task.cancel()
        except asyncio.CancelledError:
            self.timeline.cancelled()
            raise
        except BaseExceptionGroup as group:
            error = _cause(group)
        finally:
            for leg in reversed(self._legs):  # who reads goes before who gives
                await leg.close()
            self.release(*tuple(self._occupied))
        if error is None:
            return
        if not isinstance(error, PddError):
            log.error("request %s failed", self.id, exc_info=error)
        if self.finish is None:
            self.timeline.failed(error)
            self.output.fail(error)
        else:
            self.timeline.event("", f"settling failed: {error}")

    def release(self, *roles: Source) -> None:
        """These workers' part is over: others may have their place. Idempotent."""
        for role in roles:
            peer = self._occupied.pop(role, None)
            if peer is not None:
                peer.sessions -= 1

    def start(self, step: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a step beside the others; it ends with the session, and the session with its error."""
        return self._tasks.create_task(step)

    def beside(self, step: Coroutine[Any, Any, None]) -> None:
        """Run a step that the session does not wait for: it ends with the flow at the latest."""
        self._beside.append(self._tasks.create_task(step))

    @contextmanager
    def watching(self, role: Source, doing: str = "") -> Iterator[None]:
        """Inside, the session ends with `WorkerLost` as soon as the worker is lost, whoever is waiting for what.
        `doing`: what is needed of it; by default what it was last asked."""
        peer = self.workers[role]

        async def watch() -> None:
            await peer.connection.wait_closed()
            raise worker_lost(peer, doing or self._doing.get(role, "the request waited for it"))

        guard = self._tasks.create_task(watch())
        try:
            yield
        finally:
            guard.cancel()

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        await self.changed.until(condition, deadlines.CHANGE, what)

    # Tokens

    def accept(self, tokens: Iterable[Token], source: Source) -> None:
        """Enter tokens into the log and give what is new to the user, the end as well where this is it."""
        counts = self.timeline.tokens
        for entry in self.log.merge(tokens, source):
            if self.finish is not None:
                break
            token = entry.token
            setattr(counts, entry.source, getattr(counts, entry.source) + 1)
            self.last_token_at = self.timeline.elapsed
            self.output.put(token)
            if token.id in self.request.sampling.stop_token_ids:
                self.end("stop")
            elif token.position + 1 >= len(self.prompt) + self.request.max_tokens:
                self.end("length")
        self.changed.fire()

    def end(self, reason: Literal["stop", "length"]) -> None:
        """The answer is whole. The user knows at once; the session goes on until its workers are settled."""
        if self.finish is None:
            self.finish = Finish(reason, self.cached_tokens)
            self.timeline.finished(reason)
            self.output.put(self.finish)
            self.changed.fire()

    def stop(self) -> None:
        """The user has all they want, as by a stop string: end as if the model had stopped here."""
        self.cut = self.finish is None
        self.end("stop")

    # Steps

    async def prefill(self) -> None:
        """The prompt's KV is made on the prefill worker, and the first token."""
        request = PrefillRequest(id=self.id, tokens=self.prompt, sampling=self.request.sampling, salt=self.request.salt)
        leg: Leg[PrefillEvent] = self.leg(
            "prefill", "prefilling the prompt", "engine.prefill", request, PrefillEvent, deadlines.PREFILL
        )
        self.timeline.event(leg.peer, "prefill starts")
        async for event in leg:
            match event:
                case BlocksReady(tokens, cached):
                    self.cached_tokens = self.timeline.cached.prefill = cached
                    if tokens == len(self.prompt):
                        self.timeline.event(leg.peer, f"prefill ends: {tokens} tokens, {cached} of them cached")
                case Tokens(made):
                    self.timeline.event(leg.peer, "first token")
                    self.accept(made, "prefill")
        if not self.log:
            raise EngineError(f"{leg.doing}: the stream ended without a token", where=f"worker {leg.peer}")
        self.release("prefill")

    async def fetch(self, source: Source, target: Source, tokens: tuple[int, ...]) -> tuple[Held, int]:
        """Bring the KV of `tokens` from worker to worker. Returns what keeps it there until it is closed, and how many
        leading tokens' KV is there; that is less where it cannot be moved, and the engine gets it by itself."""
        return await bring(self, source, target, tokens)

    async def keep(self, source: Source, target: Source, tokens: tuple[int, ...], id: str) -> Kept:
        """Native KV: the source keeps that of `tokens` for the target's request `id`. It is asked when it has made the
        first token, so that it has the prompt's KV."""
        await self.until(lambda: len(self.log) > 0, "the first token")
        return Kept(self, source, target, tokens, id)

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
        tokens, id = self.prompt + self.log.ids[:known], self.id + suffix
        kept = await self.keep("prefill", role, tokens, id) if self.workers[role].assisted else None
        request = DecodeRequest(
            id=id,
            tokens=tokens,
            prompt_tokens=len(self.prompt),
            max_tokens=max_tokens,
            sampling=self.request.sampling,
            salt=self.request.salt,
            hold=hold,
            offer=await kept.offer() if kept else None,
        )
        leg: Leg[DecodeEvent] = self.leg(role, doing, "engine.decode", request, DecodeEvent, deadlines.EXTEND)
        if kept is not None:
            self._kept[leg] = kept
            kept.mind(leg)
        await leg.open()
        return leg

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
        raise EngineError(f"{leg.doing}: the stream ended before it began", where=f"worker {leg.peer}")

    async def follow(self, leg: Leg[DecodeEvent], take: Callable[[tuple[Token, ...]], None]) -> Stopped:
        """Give a decode's tokens to `take` until it stops."""
        stopped: Stopped | None = None

        def heard(event: DecodeEvent) -> bool:
            nonlocal stopped
            if isinstance(event, Tokens):
                take(event.tokens)
                return self.cut
            if isinstance(event, Stopped):
                stopped = event
            return stopped is not None

        if not await leg.feed(heard):
            raise EngineError(f"{leg.doing}: the stream ended without a stop", where=f"worker {leg.peer}")
        if stopped is None:
            await leg.close()
            return Stopped("stop", len(self.prompt) + len(self.log))
        return stopped

    async def answer(self, leg: Leg[DecodeEvent], begun: Callable[[], None] | None = None) -> None:
        """Main's tokens go to the user until the end of the answer; `begun` is called once the first ones are out."""

        def take(tokens: tuple[Token, ...]) -> None:
            nonlocal begun
            first, begun = begun, None
            self.accept(tokens, "main")
            if first is not None:
                first()

        stopped = await self.follow(leg, take)
        self.timeline.event(leg.peer, f"main stops: {stopped.reason}")
        # Usually the last token said so already; not where the engine ends it by itself, as at its context length.
        self.end("stop" if stopped.reason == "stop" else "length")

    async def settle(self, known: int, suffix: str = "") -> None:
        """Main gets the KV of a request that was finished without it: the next turn of the conversation finds it
        there, so that main's hit rate stays that of prefill."""
        leg, extended = await self.decode("main", "settling", known, 0, suffix=suffix)
        await leg.close()
        self.timeline.event(leg.peer, f"settled: {extended.computed} tokens computed")

    def leg(self, role: Source, doing: str, method: str, request: object, event: Any, patience: float) -> Leg[Any]:
        """A stream on the worker of that role, which is closed with the session at the latest."""
        self._doing[role] = doing
        peer = self.workers[role]
        leg: Leg[Any] = Leg(peer, doing, peer.connection.stream(method, request, event, timeout=None), patience)
        self._legs.append(leg)
        return leg


def _cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error to tell: a lost worker explains the others; of errors that are ours, the first."""
    errors = list(leaves(group))
    return min(errors, key=lambda error: (not isinstance(error, WorkerLost), not isinstance(error, PddError)))
