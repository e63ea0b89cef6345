"""What a frontend tells those of other launchers: discovery carries it with what else it says of each of them."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress

import msgspec

from pdd_runtime.frontend.experiment import Experiment
from pdd_runtime.pipeline.decisions import Decision, ordered, telling
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.rpc import SparseLog

log = logging.getLogger(__name__)
refusals = SparseLog(log)

LIMIT = 16 << 10
"""Bytes of decisions: discovery carries them to every process of the graph."""


class Bulletin:
    """The decisions about variants, with a seal: whoever can write into discovery but does not know the graph's secret
    cannot make decisions. Where there is not room for all, those go first that tell what stands, then the newest."""

    def __init__(self, experiment: Experiment, secret: str, own: WorkerKey) -> None:
        """`own`: whose this is."""
        self._experiment, self._own = experiment, own
        self._secret = secret.encode()
        self._others: dict[WorkerKey, tuple[Member, frozenset[Decision]]] = {}
        """What each of the others says."""
        self._near: frozenset[WorkerKey] = frozenset()
        self._heard = asyncio.Event()

    @property
    def news(self) -> asyncio.Event:
        """Set whenever there is more to say."""
        return self._experiment.news

    def text(self) -> str:
        """As it goes out; empty: nothing was decided yet."""
        said = self._said()
        return self._sealed(msgspec.json.encode(said)) if said else ""

    def hear(self, members: Iterable[Member], near: Collection[WorkerKey] = ()) -> None:
        """Take over what the other frontends among them say. `near`: those of this launcher, which are told by other
        ways, too, so that nobody needs to wait until discovery has told them."""
        before, self._others = self._others, {}
        self._near = frozenset(near)
        for member in members:
            if member.role == "frontend" and member.key != self._own:
                known, said = before.get(member.key, (None, frozenset()))
                if known is None or known.bulletin != member.bulletin:
                    said = self._read(member)
                self._others[member.key] = member, said
        self._experiment.hear(decision for _, said in self._others.values() for decision in said)
        self._heard.set()
        self._heard = asyncio.Event()

    def behind(self) -> list[WorkerKey]:
        """Who serves at another launcher, and has not taken over all that was decided here."""
        said = frozenset(self._said())
        far = [(who, theirs) for key, (who, theirs) in self._others.items() if key not in self._near]
        return [who.key for who, theirs in far if who.state == "ready" and not said <= theirs]

    async def carried(self, patience: float) -> None:
        """Return when nobody is behind, or after `patience` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while self.behind():
                    await self._heard.wait()

    def _said(self) -> Sequence[Decision]:
        """Those that there is room for, in order."""
        every = self._experiment.decisions
        first = telling(every)
        rest = frozenset(every).difference(first)
        said: list[Decision] = []
        room = LIMIT
        for decision in (*reversed(first), *reversed(ordered(rest))):
            room -= len(msgspec.json.encode(decision)) + 1
            if room < 0:
                break
            said.append(decision)
        return ordered(said)

    def _sealed(self, content: bytes) -> str:
        return f"{self._seal(content)} {content.decode()}"

    def _seal(self, content: bytes) -> str:
        about = f"decisions about variants of {self._experiment.graph.name}\0".encode()
        return hmac.new(self._secret, about + content, hashlib.sha256).hexdigest()

    def _read(self, member: Member) -> frozenset[Decision]:
        if not member.bulletin:
            return frozenset()
        seal, _, text = member.bulletin.partition(" ")
        content = text.encode(errors="surrogatepass")
        try:
            if hmac.compare_digest(seal.encode(errors="surrogatepass"), self._seal(content).encode()):
                return frozenset(msgspec.json.decode(content, type=list[Decision]))
            why = "it is not sealed with the graph's secret"
        except (msgspec.MsgspecError, RecursionError) as error:
            why = str(error)
        refusals.warning("what %s of %s says of variants does not count: %s", member.key, member.cluster, why)
        return frozenset()
