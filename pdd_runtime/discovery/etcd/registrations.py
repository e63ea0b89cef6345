"""The members of this process in etcd, and who has taken whose place."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from pdd_runtime.discovery.etcd.client import EtcdClient
from pdd_runtime.discovery.etcd.mirror import Mirror, Record, Slot, read, slot_of
from pdd_runtime.errors import LaunchError
from pdd_runtime.plugins.discovery import GraphMark, Member
from pdd_runtime.plugins.routing import WorkerKey


@dataclass
class _Own:
    """A member of this process."""

    member: Member
    born: float
    stood: bool = False
    """Whether etcd has ever had it."""


class Registrations:
    """An older epoch never takes the place of a newer one: neither one that was cut off and comes back, nor through an
    etcd that has forgotten both."""

    def __init__(self, mirror: Mirror, graph: GraphMark) -> None:
        self._mirror, self._graph = mirror, graph
        self._own: dict[Slot, _Own] = {}
        self._replaced: set[WorkerKey] = set()
        self._writing = asyncio.Lock()

    @property
    def slots(self) -> list[Slot]:
        """Where members of this process are to stand."""
        return list(self._own)

    @property
    def stood(self) -> bool:
        """Whether etcd has ever had one of them."""
        return any(own.stood for own in self._own.values())

    def take(self, member: Member) -> None:
        """Add it, or what has changed of it. Raises `LaunchError` where it has been replaced."""
        self.check_place(member.key)
        own = self._own.get(slot_of(member.key))
        if own is not None and own.member.key == member.key:
            own.member = member
        else:
            self._own[slot_of(member.key)] = _Own(member, time.time())

    def drop(self, key: WorkerKey) -> None:
        """It is not to be there any more."""
        own = self._own.get(slot_of(key))
        if own is not None and own.member.key == key:
            del self._own[slot_of(key)]

    def give_up(self, key: WorkerKey) -> None:
        """It was refused. One that etcd has had stays: its place is its own, and what is new of it is put later."""
        own = self._own.get(slot_of(key))
        if own is not None and not own.stood:
            self.drop(key)

    def clear(self) -> None:
        self._own.clear()

    def check_place(self, key: WorkerKey) -> None:
        """Raises `LaunchError` where a newer epoch has been seen in its place."""
        if key in self._replaced:
            raise LaunchError(
                f"{key} of epoch {key.epoch} has been replaced",
                why="a newer process registered in its place",
                fix="end this process",
            )

    def amiss(self, slots: Iterable[Slot]) -> bool:
        """Whether etcd lacks what this process has for one of them. `put` finds out who is the newer one."""
        for slot in slots:
            own, there = self._own.get(slot), self._mirror.get(slot)
            if own is not None and (there is None or there.member != own.member):
                return True
        return False

    async def put(self, client: EtcdClient, slot: Slot, lease: int) -> None:
        """Make etcd have what this process has for `slot`. Raises `LaunchError` when a newer epoch stands there,
        `GraphError` where the others have another graph."""
        async with self._writing:
            while (own := self._own.get(slot)) is not None:
                if await self._try_put(client, slot, own, lease):
                    return

    async def withdraw(self, client: EtcdClient, key: WorkerKey) -> None:
        """Take `key` out, whoever put it there; of another epoch nothing."""
        slot = slot_of(key)
        async with self._writing:
            entry = await client.get(self._mirror.key(slot))
            record = read(entry.value, slot) if entry and entry.value else None
            if entry and record and record.member.key == key:
                await client.delete(entry.key, entry.revision)

    async def _try_put(self, client: EtcdClient, slot: Slot, own: _Own, lease: int) -> bool:
        """False: somebody else was quicker."""
        if not own.stood:
            self._mirror.check_graph()
        entry = await client.get(self._mirror.key(slot))
        there = read(entry.value, slot) if entry and entry.value else None
        if there is not None and there.member.key != own.member.key:
            if not own.stood:
                # Who comes now is the newer one, whatever the clocks of two hosts say.
                own.born = max(own.born, math.nextafter(there.born, math.inf))
            elif there.order > (own.born, own.member.key.epoch):
                del self._own[slot]
                self._replaced.add(own.member.key)
                self.check_place(own.member.key)
        value = msgspec.json.encode(Record(own.member, own.born, self._graph.digest))
        if entry is None or entry.value != value or entry.lease != lease:
            revision = entry.revision if entry else 0
            if not await client.put(self._mirror.key(slot), value, lease, revision):
                return False
        own.stood = True
        return True
