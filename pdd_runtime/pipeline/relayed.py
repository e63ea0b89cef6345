"""The route P-RLD-MD: the relay decodes while the KV crosses to main, then main takes over.

What happens, by name (design: handoff = extend → seal → drain → commit):

    prefill   first token ─────────────▶ user
    relay     KV in (near) ─ decode ───▶ user ──── stops at n ···· held ···· freed
    main      KV in (far) ··········· extend, extend ─┐ decode ─▶ n+1 ─▶ user
                                                    seal n       commit

Relay and main fail each by themselves: another main begins anew while the relay goes on, and for a relay that is lost
main takes over at once, or another relay goes on until it can.
"""

from __future__ import annotations

import asyncio

from pdd_runtime.errors import PddError
from pdd_runtime.pipeline import deadlines
from pdd_runtime.pipeline.legs import Leg
from pdd_runtime.pipeline.part import Part
from pdd_runtime.pipeline.peers import Peer
from pdd_runtime.pipeline.recovery import recoverable
from pdd_runtime.pipeline.takeover import Takeover
from pdd_runtime.plugins.engine import DecodeEvent, Token
from pdd_runtime.plugins.handoff import HandoffStrategy
from pdd_runtime.plugins.messages import Seal


class Relayed:
    """The relay's side, and who is to take over from it.

    Counts are output tokens: the first of them is the prefill's, the next ones are the relay's.
    """

    def __init__(self, whole: Part, strategy: HandoffStrategy) -> None:
        self.session, self.strategy = whole.session, strategy
        self.stopped = False
        """No relay makes tokens now."""
        self.committed = False
        """Main has taken over."""
        self._whole = whole
        self._takeover: Takeover | None = None
        self._relay: Leg[DecodeEvent] | None = None
        self._relaying: asyncio.Task[None] | None = None
        self._limit = strategy.config.max_relay_tokens
        """Tokens that a relay may make."""
        self._relay_id = ""
        """By which id the relay knows its decode."""
        self._relay_lost = False
        """The last one failed."""
        self._at_end = False
        """The last one has stopped by itself, as at its context length."""
        self._relays_failed = False
        """So many have failed that no other is asked."""

    async def run(self) -> None:
        """The whole route."""
        if not self.session.log and "prefill" in self.session.crew:
            self._whole.start(self._whole.prefill())
        self._relaying = self._whole.start(self._relays())
        await self._mains()
        self.free_relay()

    # The two sides, beside each other

    async def _mains(self) -> None:
        """One main after the other, until one has taken over and given the whole answer, or nobody is left who could
        go on."""
        session = self.session
        while await self._main_there():
            part = Part(session)
            self._takeover = Takeover(part, self)
            try:
                await part.run(self._takeover.run())
                return
            except PddError as error:
                if self.committed:
                    raise
                self._takeover = None
                await self._fail_main(error)
            session.changed.fire()

    async def _fail_main(self, error: PddError) -> None:
        """Main, or who brought it its KV, before it has taken over. After too many the relay goes on alone."""
        session = self.session
        try:
            session.lost(error)
        except PddError as enough:
            if not recoverable(error) or self.stopped or session.finish is not None:
                raise
            session.timeline.event("", f"goes on without main: {enough.what}")
            session.changed.fire()
            await session.until(lambda: session.finish is not None or self.stopped, "the relay's last tokens")
            if session.finish is None:
                raise

    async def _main_there(self) -> bool:
        """A main can begin. False: none is needed, or there is no relay either."""
        session = self.session

        def unneeded() -> bool:
            if session.finish is not None:
                return "main" not in session.crew
            return self.stopped and not self._relay_wanted and not self._can_begin(session.candidate("main"))

        if not await session.staff("main", unneeded):
            return False
        return not session.crew["main"].assisted or await session.staff("prefill", unneeded)

    async def _relays(self) -> None:
        """One relay after the other, as long as one is needed."""
        session = self.session
        while True:
            await session.until(lambda: self._over or self._relay_wanted, "a relay, or main")
            if self._over or not await session.staff("relay", lambda: self._over):
                return
            if session.crew["relay"].assisted and not await session.staff("prefill", lambda: self._over):
                return
            self.stopped = self._relay_lost = False
            part = Part(session)
            try:
                await part.run(self._relay_decodes(part))
            except PddError as error:
                self._fail_relay(error)
            self.stopped, self._relay = True, None
            session.changed.fire()

    def _fail_relay(self, error: PddError) -> None:
        """The relay, or who brought it its KV."""
        session = self.session
        if self._has_all_of_relay and recoverable(error):
            assert isinstance(error.worker, Peer)
            session.timeline.event(error.worker, f"relay lost: not needed any more ({error.what})")
            session.crew.drop(error.worker)
            return
        self._relay_lost = True
        try:
            session.lost(error)
        except PddError:
            if not recoverable(error) or self._takeover is None:
                raise
            session.timeline.event("", f"goes on without a relay: {error.what}")
            self._relays_failed = True

    async def _relay_decodes(self, part: Part) -> None:
        """From where the log ends to the seal, to the relay's bound, or to the end of the answer. Then its KV is held
        until main has taken over, or until the relay has to go on because main was lost."""
        session = self.session
        part.needs("relay")
        kv, _ = await part.fetch("prefill", "relay", session.prompt)
        await session.until(lambda: len(session.log) > 0, "the first token")
        self._limit = self.strategy.relay_bound(session.crew["relay"].busy)
        known, bound = len(session.log), self.bound
        if session.finish is None and known < bound:
            relay = await part.open_decode("relay", "relaying", known, bound - known, hold=True)
            self._relay, self._relay_id = relay, part.id
            session.timeline.event(relay.peer, "relay starts")
            if self._takeover is not None and self._takeover.sealed is not None:
                await self.seal(self._takeover.sealed)
            await part.extended(relay)
            await kv.close()
            stopped = await part.follow(relay, self._take_from_relay)
            session.timeline.event(relay.peer, f"relay stops: {stopped.reason}")
            self._at_end = stopped.reason != "sealed" and len(session.log) < bound
        await kv.close()
        self.stopped = True
        session.changed.fire()
        await session.until(lambda: self._over or self._relay_wanted, "main to take over")

    def _take_from_relay(self, tokens: tuple[Token, ...]) -> None:
        sealed = self._takeover.sealed if self._takeover is not None else None
        if sealed is not None and self.strategy.carries == "tokens":
            # The seal reached the relay a moment later: main makes these again.
            end = len(self.session.prompt) + sealed
            tokens = tuple(token for token in tokens if token.position < end)
        self.session.accept(tokens, "relay")

    @property
    def bound(self) -> int:
        """Tokens at which the relay stops by itself."""
        bound = self.session.request.max_tokens
        if self._limit is not None:
            bound = min(bound, 1 + self._limit)
        sealed = self._takeover.sealed if self._takeover is not None else None
        return bound if sealed is None else min(bound, sealed)

    @property
    def _over(self) -> bool:
        return self.committed or self._relays_failed or self.session.finish is not None

    @property
    def _relay_wanted(self) -> bool:
        """A relay is needed, and there is one. None is started for the moment until a main that is ready begins."""
        session = self.session
        main_ready = self._takeover is not None and self._takeover.ready
        if self._relays_failed or self._at_end or len(session.log) >= self.bound:
            return False
        if self._relay_lost and main_ready:
            return False
        return self._can_begin(session.candidate("relay"))

    def _can_begin(self, worker: Peer | None) -> bool:
        """It is there, and who has to bring it its KV as well."""
        return worker is not None and not (worker.assisted and self.session.candidate("prefill") is None)

    @property
    def _has_all_of_relay(self) -> bool:
        """The relay has given all that this session needs of it."""
        if self.session.finish is not None:
            return True
        return self.strategy.carries == "tokens" and len(self.session.log) >= self.bound

    # For who takes over

    async def seal(self, tokens: int) -> None:
        """Tell the relay to stop when `tokens` are out."""
        session, relay = self.session, self._relay
        if relay is None or self.stopped:
            return
        seal = Seal(self._relay_id, len(session.prompt) + tokens)
        try:
            await relay.peer.connection.call("engine.seal", seal, type(None), timeout=deadlines.CALL)
        except PddError as error:
            # The relay's own stream says so, too, where it matters: tokens behind the seal are dropped anyway.
            session.timeline.event(relay.peer, f"seal failed: {error}")

    def free_relay(self) -> None:
        """Nothing more is needed of it."""
        if self._relaying is not None:
            self._relaying.cancel()
        if self._relay is not None and not self.stopped:
            self.session.timeline.event(self._relay.peer, "relay stops: let go")
        self._relay = None
        self.session.crew.release("relay")
