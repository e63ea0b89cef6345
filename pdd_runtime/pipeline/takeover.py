"""How one main takes over from the relay: it gets the prompt's KV, extends, and decodes behind the seal."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pdd_runtime.pipeline import deadlines
from pdd_runtime.pipeline.kv import Held
from pdd_runtime.pipeline.part import Part
from pdd_runtime.plugins.handoff import HandoffView

if TYPE_CHECKING:
    from pdd_runtime.pipeline.relayed import Relayed


class Takeover:
    """One main, and where the handoff to it stands. Counts are output tokens."""

    def __init__(self, part: Part, relayed: Relayed) -> None:
        self.ready = False
        """Main has the prompt's KV."""
        self.sealed: int | None = None
        """Where the relay stops and main goes on."""
        self._part, self._session, self._relayed = part, part.session, relayed
        self._record = self._session.timeline.hands_off(relayed.strategy.name)
        self._known = 0
        """Tokens whose KV main has."""
        self._rounds = 0
        self._last_outstanding: int | None = None
        self._extending: asyncio.Task[None] | None = None
        self._pinned: Held | None = None
        """Main's newest stream: it keeps the KV there that the next one builds on."""

    async def run(self) -> None:
        """From the KV's way to the end of the answer."""
        self._part.needs("main")
        self._part.start(self._bring_kv())
        known = await self._hand_off()
        if known is not None:
            await self._decode(known)
        else:
            self._relayed.free_relay()
            await self._settle()

    async def _bring_kv(self) -> None:
        """Over the link, in the background. What cannot be moved is recomputed: still nobody waits for it."""
        session, part = self._session, self._part
        kv, there = await part.fetch("prefill", "main", session.prompt)
        await self._pin(kv)
        if there < len(session.prompt):
            leg, extended = await part.decode("main", "getting the prompt's KV", 0, 0, hold=True, suffix=".prompt")
            if extended.computed:
                session.timeline.event(leg.peer, f"recomputed: {extended.computed} tokens of the prompt")
            await self._pin(leg)
        self.ready = True
        session.changed.fire()

    async def _hand_off(self) -> int | None:
        """Ask the strategy after every change, extend as it says, seal where it says, and drain. Returns the number of
        tokens behind which main decodes, all of them known; None: the answer ended without main."""
        session, strategy = self._session, self._relayed.strategy
        while session.finish is None and self.sealed is None:
            step = strategy.step(self._view())
            if step.kind == "extend":
                self._extend_to(min(step.tokens, len(session.log)))
            elif step.kind == "seal":
                self._seal(max(step.tokens, len(session.log)))
            if self.sealed is None:
                await session.changed.wait(deadlines.CHANGE, f"handoff strategy {strategy.name} to seal")
        await session.until(lambda: session.finish is not None or self._drained, "the relay's last tokens")
        return None if session.finish is not None else len(session.log)

    def _extend_to(self, tokens: int) -> None:
        if self._extending is None and self.ready and tokens > self._known:
            self._extending = self._part.start(self._extend(tokens))

    async def _extend(self, tokens: int) -> None:
        """Main computes the KV of the first `tokens` output tokens, while the relay goes on."""
        session, outstanding = self._session, len(self._session.log) - self._known
        leg, extended = await self._part.decode("main", "extending", tokens, 0, hold=True, suffix=f".{self._rounds}")
        session.timeline.event(leg.peer, f"extended: to {tokens} tokens, {extended.computed} computed")
        await self._pin(leg)
        self._known, self._last_outstanding = tokens, outstanding
        self._rounds += 1
        self._record.rounds = self._rounds
        self._record.extended += extended.computed
        self._extending = None
        session.changed.fire()

    def _seal(self, tokens: int) -> None:
        """The relay is to stop when `tokens` are out. A seal at or behind the end of the answer is none."""
        if self._relayed.stopped:
            tokens = len(self._session.log)
        tokens = min(tokens, self._relayed.bound)
        if not 0 < tokens < self._session.request.max_tokens:
            return
        self.sealed = tokens
        self._session.timeline.event("", f"seal: {tokens} tokens")
        self._part.start(self._relayed.seal(tokens))

    @property
    def _drained(self) -> bool:
        """All that main must know is known, and main can begin."""
        if self.sealed is None or not self.ready:
            return False
        # Where its KV is moved, the relay's true end counts: the tail block has a name only when it has stopped.
        # A relay that is lost has an end as well.
        sends_all = self._relayed.strategy.carries == "tokens" and len(self._session.log) >= self.sealed
        return sends_all or self._relayed.stopped

    async def _decode(self, known: int) -> None:
        """Main goes on behind the first `known` tokens. Its first token is the commit: the relay is let go."""
        session, part = self._session, self._part
        self._record.sealed_at = known
        if self._relayed.strategy.carries == "kv":
            # The last token's own KV is not there: nobody has read that token yet.
            kv, _ = await part.fetch("relay", "main", session.prompt + session.log.ids[: known - 1])
            await self._pin(kv)
        session.timeline.event(session.crew["main"], f"main starts: behind {known} tokens")
        leg, extended = await part.decode("main", "decoding", known, session.request.max_tokens - known)
        self._record.extended += extended.computed
        if self._extending is not None:
            self._extending.cancel()
        await self._pin(leg)
        last_of_relay = session.last_token_at

        def commit() -> None:
            self._record.gap = session.last_token_at - last_of_relay
            session.timeline.event(leg.peer, f"commit: gap {self._record.gap:.3f} s")
            self._relayed.committed = True
            session.taken_over(leg.peer)
            self._relayed.free_relay()

        await part.answer(leg, commit)

    async def _settle(self) -> None:
        """The answer ended without main; main gets its KV all the same."""
        session = self._session
        await session.until(lambda: self.ready and self._extending is None, "main to have the prompt's KV")
        if self._known < len(session.log):
            await self._part.settle(len(session.log), suffix=".settle")

    async def _pin(self, leg: Held) -> None:
        """`leg` has found its KV on main: older streams need not keep it there any more."""
        older, self._pinned = self._pinned, leg
        if older is not None:
            await older.close()

    def _view(self) -> HandoffView:
        session, relay = self._session, self._session.crew.get("relay")
        return HandoffView(
            known=len(session.log),
            relay_tokens=session.timeline.tokens.relay,
            main_ready=self.ready,
            main_known=self._known,
            extending=self._extending is not None,
            rounds=self._rounds,
            last_outstanding=self._last_outstanding,
            relay_stopped=self._relayed.stopped,
            relay_load=relay.busy if relay is not None else 0.0,
        )
