"""One worker, as a driver that is connected to it knows it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pdd_runtime.clock import now
from pdd_runtime.pipeline.pulse import Pulse
from pdd_runtime.pipeline.sender import Fetch, Fetches, Seen, Sender
from pdd_runtime.pipeline.times import Times
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.plugins.engine import Load
from pdd_runtime.plugins.messages import WatchEvent
from pdd_runtime.plugins.routing import WorkerView
from pdd_runtime.rpc import RpcConnection


class Peer:
    """One connection to one worker, and what the worker last said of itself."""

    def __init__(self, member: Member, connection: RpcConnection) -> None:
        self.member, self.connection = member, connection
        self.key = member.key
        self._capabilities = member.info.capabilities.names if member.info else frozenset()
        self.names: set[bytes] = set()
        """Of the blocks that are cached there."""
        self.load = Load()
        self.others = 0
        """Requests there that are not of this driver."""
        self._senders: dict[str, Sender] = {}
        """What it sees of its ways, by the clusters that they lead to."""
        self._fetches: dict[str, Fetches] = {}
        """What this driver sees of them."""
        self.sessions = 0
        """Sessions of this driver that need it. They count at once; the worker's own load comes a moment later."""
        self.giving = 0
        """Times that it brings KV to another worker, or will have to: it is needed for that beside its sessions."""
        self.less = Pulse()
        """A session needs it no more."""
        self.draining = False
        """It has said that it takes no new sessions."""

    def __str__(self) -> str:
        return str(self.key)

    def update(self, event: WatchEvent) -> None:
        self.names.difference_update(event.removed)
        self.names.update(event.added)
        self.load = event.load
        self.others = max(0, event.load.running + event.load.waiting - event.yours)
        for telemetry in event.links:
            sender = self._senders.setdefault(telemetry.cluster, Sender(self.member.cluster))
            sender.update(telemetry, now())
        self.draining = self.draining or event.draining

    def sees(self, at: float) -> list[Seen]:
        """Of its ways to other clusters, at that moment."""
        ways: tuple[Sender | Fetches, ...] = (*self._senders.values(), *self._fetches.values())
        return [seen for way in ways if (seen := way.seen(at))]

    @contextmanager
    def sends(self, cluster: str) -> Iterator[Fetch]:
        """It sends KV to a worker of that cluster."""
        if cluster not in self._fetches:
            self._fetches[cluster] = Fetches(self.member.cluster, cluster)
        fetch = Fetch(self._fetches[cluster])
        try:
            yield fetch
        finally:
            fetch.end(now())

    @property
    def needed(self) -> bool:
        """A session of this driver may still ask something of it."""
        return self.sessions > 0 or self.giving > 0

    @contextmanager
    def gives(self) -> Iterator[None]:
        """It brings KV to another worker."""
        self.giving += 1
        try:
            yield
        finally:
            self.giving -= 1
            self.less.fire()

    @property
    def busy(self) -> float:
        """Requests there over its batch limit."""
        return (self.others + self.sessions) / max(1, self.load.batch_limit)

    def tokens_in(self, blocks: int) -> int:
        """How many tokens that many blocks hold, when all are full."""
        return blocks * self.member.info.layout.block_size if self.member.info else 0

    def blocks_in(self, tokens: int) -> int:
        """How many blocks so many tokens take."""
        return -(-tokens // self.member.info.layout.block_size) if self.member.info else 0

    @property
    def assisted(self) -> bool:
        """It computes no KV of known tokens: each of its decodes needs an offer over all of them."""
        return self.member.info is not None and self.member.info.capabilities.extend == "prefill_assisted"

    @property
    def token_bytes(self) -> int:
        """Of the KV of one token, as it lies there; 0: not known."""
        return self.member.info.layout.token_bytes if self.member.info else 0

    def view(self, cached_tokens: int, times: Times = Times()) -> WorkerView:  # noqa: B008 - frozen
        assert self.member.role != "frontend"
        requests = self.others + self.sessions
        running = min(requests, self.load.running)
        return WorkerView(
            key=self.key,
            role=self.member.role,
            cluster=self.member.cluster,
            cached_tokens=cached_tokens,
            running=running,
            waiting=requests - running,
            batch_limit=max(1, self.load.batch_limit),
            capabilities=self._capabilities,
            token_bytes=self.token_bytes,
            token_time=times.token,
            request_time=times.request,
        )
