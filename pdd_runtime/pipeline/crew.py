"""The workers that a session has now, by role."""

from __future__ import annotations

from collections.abc import Mapping

from pdd_runtime.pipeline.peers import Peer
from pdd_runtime.pipeline.token_log import Source
from pdd_runtime.plugins.routing import WorkerKey


class Crew:
    """Every worker counts the session from when it is taken until its part is over."""

    def __init__(self, workers: Mapping[Source, Peer]) -> None:
        """An aggregated worker stands as main."""
        self._workers: dict[Source, Peer] = {}
        self._counted: dict[Source, Peer] = {}
        self._giving: Peer | None = None
        """The prefill whose part is over, whose KV those that are assisted will ask for again."""
        self.replace(workers)

    def __contains__(self, role: Source) -> bool:
        return role in self._workers

    def __getitem__(self, role: Source) -> Peer:
        """Raises `KeyError`."""
        return self._workers[role]

    def __str__(self) -> str:
        return ", ".join(str(peer) for peer in self._workers.values())

    def get(self, role: Source) -> Peer | None:
        return self._workers.get(role)

    @property
    def keys(self) -> frozenset[WorkerKey]:
        return frozenset(peer.key for peer in self._workers.values())

    def take(self, role: Source, peer: Peer) -> None:
        """From now on it is this one."""
        if role in self._workers:
            self.drop(self._workers[role])
        self._workers[role] = self._counted[role] = peer
        peer.sessions += 1

    def replace(self, workers: Mapping[Source, Peer]) -> None:
        """From now on it is these, and no others."""
        self.leave()
        self._workers.clear()
        for role, peer in workers.items():
            self.take(role, peer)

    def release(self, role: Source) -> None:
        """Its part is over: others may have its place. Idempotent."""
        peer = self._counted.pop(role, None)
        if peer is None:
            return
        peer.sessions -= 1
        if role == "prefill" and any(worker.assisted for worker in self._workers.values()):
            self._giving = peer
            peer.giving += 1
        peer.less.fire()

    def drop(self, peer: Peer) -> bool:
        """It is needed no more. False: it was none of them."""
        role = next((role for role, worker in self._workers.items() if worker is peer), None)
        if role is None:
            return False
        self.release(role)
        del self._workers[role]
        if peer is self._giving:
            self._forget()
        return True

    def leave(self) -> None:
        """Nothing more is needed of any of them. Idempotent."""
        for role in tuple(self._counted):
            self.release(role)
        self._forget()

    def _forget(self) -> None:
        peer, self._giving = self._giving, None
        if peer is not None:
            peer.giving -= 1
            peer.less.fire()
