"""The route P-RLD-MD: the relay decodes while the KV crosses to main, then main takes over.

What happens, by name (design: handoff = extend → seal → drain → commit):

    prefill   first token ─────────────▶ user
    relay     KV in (near) ─ decode ───▶ user ──── stops at n ···· held ···· freed
    main      KV in (far) ··········· extend, extend ─┐ decode ─▶ n+1 ─▶ user
                                                    seal n       commit
"""

from __future__ import annotations

import asyncio

from pdd_runtime.errors import PddError, WorkerLost
from pdd_runtime.pipeline import deadlines
from pdd_runtime.pipeline.kv import Held
from pdd_runtime.pipeline.legs import Leg
from pdd_runtime.pipeline.session import Session
from pdd_runtime.plugins.engine import DecodeEvent, Token
from pdd_runtime.plugins.handoff import HandoffStrategy, HandoffView
from pdd_runtime.plugins.messages import Seal


class Relayed:
    """One session's relay and main, and where the handoff between them stands.

    Counts are output tokens: the first of them is the prefill's, the next ones are the relay's.
    """

    def __init__(self, session: Session, strategy: HandoffStrategy) -> None:
        self.session, self.strategy = session, strategy
        self.record = session.timeline.hands_off(strategy.name)
        self.main_ready = False
        self.main_known = 0
        self.rounds = 0
        self.last_outstanding: int | None = None
        self.relay_stopped = False
        self.sealed: int | None = None
        """Where the relay stops and main goes on."""
        self._relay: Leg[DecodeEvent] | None = None
        self._relaying: asyncio.Task[None] | None = None
        self._extending: asyncio.Task[None] | None = None
        self._pinned: Held | None = None
        """Main's newest stream: it keeps the KV there that the next one builds on."""

    async def run(self) -> None:
        """The whole route."""
        session = self.session
        with session.watching("main"):
            session.start(session.prefill())
            session.start(self._bring_kv_to_main())
            self._relaying = session.start(self._relay_decodes())
            sealed = await self._hand_off()
            if sealed is not None:
                await self._main_decodes(sealed)
            else:
                await self._free_relay()
                await self._settle()

    # The two sides, beside each other

    async def _bring_kv_to_main(self) -> None:
        """Over the link, in the background. What cannot be moved is recomputed: still nobody waits for it."""
        session = self.session
        kv, there = await session.fetch("prefill", "main", session.prompt)
        await self._pin(kv)
        if there < len(session.prompt):
            leg, extended = await session.decode("main", "getting the prompt's KV", 0, 0, hold=True, suffix=".prompt")
            if extended.computed:
                session.timeline.event(leg.peer, f"recomputed: {extended.computed} tokens of the prompt")
            await self._pin(leg)
        self.main_ready = True
        session.changed.fire()

    async def _relay_decodes(self) -> None:
        """From the first token to the seal, to the relay's bound, or to the end of the answer."""
        session = self.session
        try:
            kv, _ = await session.fetch("prefill", "relay", session.prompt)
            await session.until(lambda: len(session.log) > 0, "the first token")
            known, bound = len(session.log), self._relay_bound
            if session.finish is None and known < bound:
                self._relay = await session.open_decode("relay", "relaying", known, bound - known, hold=True)
                session.timeline.event(self._relay.peer, "relay starts")
                if self.sealed is not None:
                    await self._tell_seal(self.sealed)
                await session.extended(self._relay)
                await kv.close()
                stopped = await session.follow(self._relay, self._take_from_relay)
                session.timeline.event(self._relay.peer, f"relay stops: {stopped.reason}")
            await kv.close()
        except WorkerLost as error:
            if not self._has_all_of_relay:
                raise
            session.timeline.event(session.workers["relay"], f"relay lost: not needed any more ({error.why})")
        self.relay_stopped = True
        session.changed.fire()

    def _take_from_relay(self, tokens: tuple[Token, ...]) -> None:
        if self.sealed is not None and self.strategy.carries == "tokens":
            # The seal reached the relay a moment later: main makes these again.
            end = len(self.session.prompt) + self.sealed
            tokens = tuple(token for token in tokens if token.position < end)
        self.session.accept(tokens, "relay")

    @property
    def _relay_bound(self) -> int:
        """Tokens at which the relay stops by itself."""
        bound = self.session.request.max_tokens
        if self.strategy.config.max_relay_tokens is not None:
            bound = min(bound, 1 + self.strategy.config.max_relay_tokens)
        return bound if self.sealed is None else min(bound, self.sealed)

    @property
    def _has_all_of_relay(self) -> bool:
        """The relay has given all that this session needs of it."""
        if self.session.finish is not None:
            return True
        return self.sealed is not None and self.strategy.carries == "tokens" and len(self.session.log) >= self.sealed

    # The handoff: extend, seal, drain, commit

    async def _hand_off(self) -> int | None:
        """Ask the strategy after every change, extend as it says, seal where it says, and drain. Returns the number of
        tokens behind which main decodes, all of them known; None: the answer ended without main."""
        session = self.session
        while session.finish is None and self.sealed is None:
            step = self.strategy.step(self._view())
            if step.kind == "extend":
                self._extend_to(min(step.tokens, len(session.log)))
            elif step.kind == "seal":
                self._seal(max(step.tokens, len(session.log)))
            if self.sealed is None:
                await session.changed.wait(deadlines.CHANGE, f"handoff strategy {self.strategy.name} to seal")
        await session.until(lambda: session.finish is not None or self._drained, "the relay's last tokens")
        return None if session.finish is not None else len(session.log)

    def _extend_to(self, tokens: int) -> None:
        if self._extending is None and self.main_ready and tokens > self.main_known:
            self._extending = self.session.start(self._extend(tokens))

    async def _extend(self, tokens: int) -> None:
        """Main computes the KV of the first `tokens` output tokens, while the relay goes on."""
        session, outstanding = self.session, len(self.session.log) - self.main_known
        leg, extended = await session.decode("main", "extending", tokens, 0, hold=True, suffix=f".{self.rounds}")
        session.timeline.event(leg.peer, f"extended: to {tokens} tokens, {extended.computed} computed")
        await self._pin(leg)
        self.main_known, self.last_outstanding = tokens, outstanding
        self.rounds += 1
        self.record.rounds = self.rounds
        self.record.extended += extended.computed
        self._extending = None
        session.changed.fire()

    def _seal(self, tokens: int) -> None:
        """The relay is to stop when `tokens` are out. A seal at or behind the end of the answer is none."""
        if self.relay_stopped:
            tokens = len(self.session.log)
        tokens = min(tokens, self._relay_bound)
        if not 0 < tokens < self.session.request.max_tokens:
            return
        self.sealed = tokens
        self.session.timeline.event("", f"seal: {tokens} tokens")
        if self._relay is not None and not self.relay_stopped:
            self.session.start(self._tell_seal(tokens))

    async def _tell_seal(self, tokens: int) -> None:
        relay, seal = self.session.workers["relay"], Seal(self.session.id, len(self.session.prompt) + tokens)
        try:
            await relay.connection.call("engine.seal", seal, type(None), timeout=deadlines.CALL)
        except PddError as error:
            # The relay's own stream says so, too, where it matters: tokens behind the seal are dropped anyway.
            self.session.timeline.event(relay, f"seal failed: {error}")

    @property
    def _drained(self) -> bool:
        """All that main must know is known, and main can begin."""
        if self.sealed is None or not self.main_ready:
            return False
        # Where its KV is moved, the relay's true end counts: the tail block has a name only when it has stopped.
        return self.relay_stopped if self.strategy.carries == "kv" else len(self.session.log) >= self.sealed

    async def _main_decodes(self, known: int) -> None:
        """Main goes on behind the first `known` tokens. Its first token is the commit: the relay is let go."""
        session = self.session
        self.record.sealed_at = known
        if self.strategy.carries == "kv":
            # The last token's own KV is not there: nobody has read that token yet.
            kv, _ = await session.fetch("relay", "main", session.prompt + session.log.ids[: known - 1])
            await self._pin(kv)
        session.timeline.event(session.workers["main"], f"main starts: behind {known} tokens")
        leg, extended = await session.decode("main", "decoding", known, session.request.max_tokens - known)
        self.record.extended += extended.computed
        if self._extending is not None:
            self._extending.cancel()
        await self._pin(leg)
        last_of_relay = session.last_token_at

        def commit() -> None:
            self.record.gap = session.last_token_at - last_of_relay
            session.timeline.event(leg.peer, f"commit: gap {self.record.gap:.3f} s")
            session.start(self._free_relay())

        await session.answer(leg, commit)

    # What is left behind

    async def _free_relay(self) -> None:
        if self._relaying is not None:
            self._relaying.cancel()
        if self._relay is not None:
            if not self.relay_stopped:
                self.session.timeline.event(self._relay.peer, "relay stops: let go")
            await self._relay.close()
        self.session.release("relay")

    async def _settle(self) -> None:
        """The answer ended without main; main gets its KV all the same."""
        session = self.session
        await session.until(lambda: self.main_ready and self._extending is None, "main to have the prompt's KV")
        if self.main_known < len(session.log):
            await session.settle(len(session.log), suffix=".settle")

    async def _pin(self, leg: Held) -> None:
        """`leg` has found its KV on main: older streams need not keep it there any more."""
        older, self._pinned = self._pinned, leg
        if older is not None:
            await older.close()

    def _view(self) -> HandoffView:
        log = self.session.log
        return HandoffView(
            known=len(log),
            relay_tokens=self.session.timeline.tokens.relay,
            main_ready=self.main_ready,
            main_known=self.main_known,
            extending=self._extending is not None,
            rounds=self.rounds,
            last_outstanding=self.last_outstanding,
            relay_stopped=self.relay_stopped,
            relay_load=self.session.workers["relay"].busy,
        )
