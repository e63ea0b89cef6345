"""One request in flight: its token log, its workers, and how it goes on when one of them fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Literal

from pdd_runtime.clock import now
from pdd_runtime.errors import DeadlineExceeded, NoRoute, PddError, WorkerLost
from pdd_runtime.graph import Recovery
from pdd_runtime.observe import RecoveryRecord, Timeline
from pdd_runtime.pipeline import deadlines
from pdd_runtime.pipeline.crew import Crew
from pdd_runtime.pipeline.edges import Edges
from pdd_runtime.pipeline.output import Output
from pdd_runtime.pipeline.part import Part
from pdd_runtime.pipeline.peers import Peer
from pdd_runtime.pipeline.planner import GO_ON, Planner, Workers
from pdd_runtime.pipeline.pulse import Pulse
from pdd_runtime.pipeline.recovery import Silent, gave_up, recoverable
from pdd_runtime.pipeline.request import Finish, SessionRequest
from pdd_runtime.pipeline.token_log import Source, TokenLog
from pdd_runtime.plugins.engine import Token
from pdd_runtime.plugins.routing import Route, WorkerKey

log = logging.getLogger(__name__)

Flow = Callable[[Part], Coroutine[Any, Any, None]]
"""What is done with a session that has certain workers, from where its log ends. Where it ends before the answer does,
they cannot go on by themselves."""


class Session:
    """What outlives a worker. Whatever is done with workers is done in parts; one that fails is followed by another,
    with other workers, that goes on behind the log."""

    def __init__(
        self,
        request: SessionRequest,
        route: Route,
        workers: Workers,
        planner: Planner,
        edges: Edges,
        timeline: Timeline,
        recovery: Recovery,
    ) -> None:
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
        self.route: Route | None = route
        """None: its workers are what was left."""
        self.crew = Crew(workers)
        self.edges = edges
        """Which pool feeds which, and how."""
        self.planner = planner
        self.prompt_id, self.prompt_at = request.id, workers.get("prefill")
        """By which id the prompt is prefilled, and where."""
        self._recovery = recovery
        self._failed: set[WorkerKey] = set()
        self._failure: PddError | None = None
        """The last one."""
        self._losses = 0
        self._in_a_row: dict[str, tuple[int, int]] = {}
        """Of all, and of each role: tokens it had made at its last loss, and losses without a token in between."""
        self._open: list[RecoveryRecord] = []
        """Recoveries of which it is not known yet who takes over."""

    # Its life

    async def run(self, flow: Flow) -> None:
        """Go through `flow`, again after every failure that can be recovered from. What cannot is told to the user
        through `output`, and to the timeline."""
        try:
            await self._run(flow)
        except asyncio.CancelledError:
            self.timeline.cancelled()
            raise
        except Exception as error:
            if not isinstance(error, PddError):
                log.error("request %s failed", self.id, exc_info=error)
            if self.finish is None:
                self.timeline.failed(error)
                self.output.fail(error)
            else:
                self.timeline.event("", f"settling failed: {error}")
        finally:
            self.leave()

    def leave(self) -> None:
        """It needs its workers no more. Idempotent."""
        self.crew.leave()

    async def _run(self, flow: Flow) -> None:
        while True:
            part = Part(self)
            if not self.log:
                self.prompt_id, self.prompt_at = part.id, self.crew.get("prefill")
            try:
                await part.run(flow(part))
            except PddError as error:
                self.lost(error)
            if self.finish is None:
                await self._again()
            if self.finish is not None:
                return

    # Recovery

    @property
    def part_id(self) -> str:
        """By which id workers know a part that begins now: a worker may still be busy with what has failed."""
        return f"{self.id}.r{self._losses}" if self._losses else self.id

    def lost(self, error: PddError) -> None:
        """A part has failed; another is to go on. Raises `error` where none can, or enough have failed already."""
        if self.finish is not None or not recoverable(error):
            raise error
        peer = error.worker
        assert isinstance(peer, Peer)
        self._failure = error
        if not isinstance(error, Silent):  # such a one is out of the view, and as good as any other when it is heard
            self._failed.add(peer.key)
        if not self.crew.drop(peer):
            return  # another part has said so
        role = "main" if peer.member.role == "aggregated" else peer.member.role
        for who, tokens in (("all", len(self.log)), (role, getattr(self.timeline.tokens, role))):
            before, count = self._in_a_row.get(who, (-1, 0))
            self._in_a_row[who] = tokens, count = tokens, count + 1 if tokens == before else 1
            if count > self._recovery.attempts:
                raise gave_up(error, f"gone on elsewhere {self._recovery.attempts} times, without a token in between")
        self._losses += 1
        self._open.append(self.timeline.recovers(peer.member.role, peer, error.code, error))
        log.warning("request %s: %s; it goes on behind %d tokens", self.id, " ".join(str(error).split()), len(self.log))

    def replaced(self, error: PddError, to: Peer) -> None:
        """A worker was lost that others do without: `to` has what it has, or computes it."""
        peer = error.worker
        assert isinstance(peer, Peer)
        self._failed.add(peer.key)
        if self.crew.drop(peer):
            self.timeline.recovers(peer.member.role, peer, error.code, error).to = str(to)

    def replaceable(self, peer: Peer, role: Source) -> bool:
        """It is worth while to give up a worker that is silent."""
        able = self.planner.able(self.request, self.log.ids, GO_ON[role])
        return any(other is not peer for other in able)

    async def gone(self, peer: Peer, role: Source) -> type[WorkerLost]:
        """Return when the session cannot wait for a worker any longer: it is dead, or silent while others are not."""
        while True:
            await peer.connection.wait_suspected()
            if peer.connection.closed:
                return WorkerLost
            if self.replaceable(peer, role):
                return Silent
            await asyncio.sleep(deadlines.LOOK)

    def spare(self, role: Source, *, again: bool = False) -> Peer | None:
        """Who could take that role, beside those that have the others; with `again` also one that has failed, where
        there is no other."""
        crew = self.crew
        feeding, fed_by = (crew.get("main"), None) if role == "relay" else (None, crew.get("relay"))
        if role == "prefill":
            feeding, fed_by = crew.get("main") or crew.get("relay"), None
        peer = self.planner.spare(role, self.request, self.log.ids, self._failed, feeding=feeding, fed_by=fed_by)
        return peer if peer is None or again or peer.key not in self._failed else None

    def candidate(self, role: Source) -> Peer | None:
        """Who has that role, or could take it, and has not failed."""
        return self.crew.get(role) or self.spare(role)

    async def staff(self, role: Source, unneeded: Callable[[], bool]) -> bool:
        """Have a worker in that role; where there is none, wait for one. False: it is not needed any more. Raises the
        last failure where none comes."""

        await self._patiently(
            lambda: unneeded() or role in self.crew or self.spare(role, again=True) is not None,
            lambda: f"no {role} worker came",
        )
        if unneeded():
            return False
        if role not in self.crew and (peer := self.spare(role, again=True)) is not None:
            self.crew.take(role, peer)
            self.taken_over(peer)
            await self._pause((peer.key,))
        return True

    async def _again(self) -> None:
        """A new crew, for all that is left to do. Raises the last failure where none can be had in time."""
        why = ""

        def planned() -> bool:
            nonlocal why
            try:
                self.route, workers = self.planner.again(self.request, self.log.ids, self._failed)
                self.crew.replace(workers)
            except NoRoute as refusal:
                why = refusal.what
                return False
            return True

        self.crew.replace({})
        await self._patiently(lambda: self.finish is not None or planned(), lambda: f"nobody came who can go on: {why}")
        self.taken_over(self.crew)
        await self._pause(self.crew.keys)

    def taken_over(self, to: Crew | Peer) -> None:
        """By somebody who does what those did that were lost."""
        if self._open:
            self.timeline.event("", f"goes on: {to}")
            if self.planner.foreign(to.keys if isinstance(to, Crew) else (to.key,)):
                self.timeline.elsewhere = "failed"
        for record in self._open:
            record.to = str(to)
        self._open.clear()

    async def _pause(self, peers: Iterable[WorkerKey]) -> None:
        """Before asking workers that have failed the session before."""
        if not self._failed.isdisjoint(peers):
            await asyncio.sleep(min(deadlines.LAST_PAUSE, deadlines.FIRST_PAUSE * 2**self._losses))

    async def _patiently(self, condition: Callable[[], bool], otherwise: Callable[[], str]) -> None:
        """Return when `condition` holds. Raises the last failure when nothing comes for too long."""
        known, until = len(self.log), now() + self._recovery.wait
        while not condition():
            if len(self.log) > known:
                known, until = len(self.log), now() + self._recovery.wait
            try:
                await self.changed.wait(max(0.0, until - now()), "a worker")
            except DeadlineExceeded:
                assert self._failure is not None
                raise gave_up(self._failure, f"in {self._recovery.wait:.3g} s {otherwise()}") from None

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

    def cached_on_main(self, tokens: int) -> None:
        """So many leading tokens' KV was there before the request came: what is said first is so."""
        cached = self.timeline.cached
        if cached.main is None:
            cached.main = min(tokens, len(self.prompt))

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

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        await self.changed.until(condition, deadlines.CHANGE, what)
