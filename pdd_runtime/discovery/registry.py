"""The registry: who is there, kept by the launcher for the processes of one host."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec

from pdd_runtime.clock import now
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.rpc import RpcContext, RpcServer, SparseLog

log = logging.getLogger(__name__)

TTL = 5.0
"""Seconds. Only a wedged process is noticed by it: of a dead one the launcher says so at once."""

Slot = tuple[str, int]
"""(pool, index): of all epochs only the newest may stand there."""


class Registration(msgspec.Struct, frozen=True):
    """One renewal: the whole member each time, so that a registry that was restarted learns all again."""

    member: Member
    born: float
    """When this epoch first registered, on the clock of the host. Epochs are opaque; this orders them."""


class Receipt(msgspec.Struct, frozen=True):
    """Whether a registration stands; if not, a newer epoch of its slot has been seen."""

    accepted: bool


class Departure(msgspec.Struct, frozen=True):
    """The member says it is gone."""

    key: WorkerKey


class Watch(msgspec.Struct, frozen=True):
    """Ask for the views from now on."""


class View(msgspec.Struct, frozen=True):
    """All members, ordered by key."""

    members: tuple[Member, ...]
    settled: bool
    """False while the registry is so young that living members may not have registered yet."""


@dataclass(slots=True)
class _Lease:
    member: Member
    expires_at: float


class RegistryServer:
    """Serves `discovery.register`, `.unregister` and `.watch` on an `RpcServer`; the launcher calls it directly.

    Of one (pool, index) the newer registration wins, and the older epoch is refused from then on, even after
    the newer has gone. Make it on the running event loop.
    """

    def __init__(self, server: RpcServer, ttl: float = TTL) -> None:
        self.ttl = ttl
        self.version = 0
        """Counts the changes of `members()`."""
        self._loop = asyncio.get_running_loop()
        self._leases: dict[Slot, _Lease] = {}
        self._newest: dict[Slot, float] = {}
        self._change = asyncio.Event()
        self._refusals = SparseLog(log)
        self._settled = False
        self._settling = self._loop.call_later(ttl, self._settle)
        self._expiry: asyncio.TimerHandle | None = None
        server.unary("discovery.register", Registration, self._on_register)
        server.unary("discovery.unregister", Departure, self._on_unregister)
        server.stream("discovery.watch", Watch, self._on_watch)

    def members(self) -> tuple[Member, ...]:
        """Who is there now, ordered by key."""
        return tuple(sorted((lease.member for lease in self._leases.values()), key=lambda member: member.key))

    def remove(self, key: WorkerKey) -> None:
        """Its process is dead: take it out at once, and refuse what it may still have sent. A successor stays."""
        slot = _slot(key)
        if (lease := self._leases.get(slot)) is not None and lease.member.key == key:
            del self._leases[slot]
            # Just above its own birth: a successor that is registering at this moment is not refused.
            self._newest[slot] = math.nextafter(self._newest[slot], math.inf)
            self._notify()

    async def changed(self, version: int) -> int:
        """Return the version as soon as it is not `version`: no change between two calls is missed."""
        while self.version == version:
            await self._change.wait()
        return self.version

    def close(self) -> None:
        """Stop its timers. The server is closed by its owner."""
        self._settling.cancel()
        if self._expiry is not None:
            self._expiry.cancel()

    async def _on_register(self, registration: Registration, context: RpcContext) -> Receipt:
        member, slot = registration.member, _slot(registration.member.key)
        if registration.born < self._newest.get(slot, registration.born):
            self._refusals.warning(
                "%s of epoch %s is refused: a newer process has its place", member.key, member.key.epoch
            )
            return Receipt(accepted=False)
        self._newest[slot] = registration.born
        before = self._leases.get(slot)
        self._leases[slot] = _Lease(member, now() + self.ttl)
        if before is None or before.member != member:
            self._notify()
        if self._expiry is None:
            self._await_expiry()
        return Receipt(accepted=True)

    async def _on_unregister(self, departure: Departure, context: RpcContext) -> None:
        self.remove(departure.key)

    async def _on_watch(self, watch: Watch, context: RpcContext) -> AsyncGenerator[View, None]:
        while True:
            version = self.version
            yield View(self.members(), self._settled)
            await self.changed(version)

    def _notify(self) -> None:
        self.version += 1
        self._change.set()
        self._change = asyncio.Event()

    def _settle(self) -> None:
        self._settled = True
        self._notify()

    def _await_expiry(self) -> None:
        first = min((lease.expires_at for lease in self._leases.values()), default=None)
        self._expiry = None if first is None else self._loop.call_later(max(0.0, first - now()), self._expire, first)

    def _expire(self, due: float) -> None:
        time = now()
        if time - due > self.ttl / 4:
            # This process was stopped or starved, so renewals lie unread: the members are not to blame.
            for lease in self._leases.values():
                lease.expires_at = time + self.ttl
        dead = [slot for slot, lease in self._leases.items() if lease.expires_at <= time]
        for slot in dead:
            del self._leases[slot]
        if dead:
            self._notify()
        self._await_expiry()


def _slot(key: WorkerKey) -> Slot:
    return key.pool, key.index
