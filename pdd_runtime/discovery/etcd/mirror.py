"""What etcd has of a graph, as one process knows it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import msgspec

from pdd_runtime.discovery.etcd.client import Entry
from pdd_runtime.discovery.etcd.forged import GRAPH_LIMIT, MEMBER_LIMIT, decoded, fault
from pdd_runtime.discovery.mark import differences
from pdd_runtime.errors import GraphError
from pdd_runtime.plugins.discovery import GraphMark, Member
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.rpc import SparseLog

refusals = SparseLog(logging.getLogger(__name__))

Slot = tuple[str, int]
"""(pool, index): of all epochs only the newest may stand there."""


class Record(msgspec.Struct, frozen=True):
    """The value of a member's key."""

    member: Member
    born: float
    """When this epoch first registered, seconds of Unix time, and later than whoever stood there. Epochs are opaque;
    this orders them."""
    graph: str
    """Digest of its graph."""

    @property
    def order(self) -> tuple[float, str]:
        return self.born, self.member.key.epoch


SUCCESSORS = 1024
"""Of one digest, kept."""


class Mirror:
    """Members, and the graphs that they belong to. Only those of the same graph are shown."""

    def __init__(self, prefix: str, graph: GraphMark) -> None:
        self.root = f"{prefix}/{graph.name}/".encode()
        self.listed = False
        """Whether etcd has ever been heard."""
        self.graphs: dict[str, dict[str, Any]] = {}
        """What each digest stands for."""
        self.successors: dict[str, tuple[str, ...]] = {}
        """Which digests each succeeds. Never forgotten: who said so may have ended."""
        self.said: set[str] = set()
        """Those of which etcd has it now."""
        self._graph = graph
        self._members_root = self.root + b"members/"
        self._graphs_root = self.root + b"graphs/"
        self._successors_root = self.root + b"successors/"
        self._records: dict[Slot, Record] = {}
        self._kept: dict[Slot, Record] = {}
        self._shown: tuple[Member, ...] | None = None

    def key(self, slot: Slot) -> bytes:
        return self._members_root + f"{slot[0]}/{slot[1]}".encode()

    def graph_key(self) -> bytes:
        return self._graphs_root + self._graph.digest.encode()

    def successor_key(self) -> bytes:
        return self._successors_root + self._graph.digest.encode()

    def get(self, slot: Slot) -> Record | None:
        return self._records.get(slot)

    def restart(self, entries: Iterable[Entry], *, keep: bool) -> None:
        """Begin anew with all that is there. `keep`: these servers may not have heard of everybody again, so who is
        missing is still shown, until `settle`."""
        before = {**self._kept, **self._records} if keep else {}
        self._records, self._kept, self.graphs, self.said = {}, before, {}, set()
        self.apply(entries)
        self.listed = True

    def settle(self) -> bool:
        """Who has not been heard of by now is gone. Whether that changes anything."""
        changed = bool(self._kept)
        self._kept = {}
        self._shown = None
        return changed

    def apply(self, entries: Iterable[Entry]) -> set[Slot]:
        """Take what has changed; returns the slots concerned."""
        slots = set()
        for entry in entries:
            if entry.key.startswith(self._graphs_root):
                self._take_graph(entry)
            elif entry.key.startswith(self._successors_root):
                self._take_successor(entry)
            elif (slot := self._slot(entry.key)) is not None:
                slots.add(slot)
                self._take_member(slot, entry.value)
        self._shown = None
        return slots

    def members(self) -> tuple[Member, ...]:
        """Those of this graph, ordered by key."""
        if self._shown is None:
            records = {**self._kept, **self._records}.values()
            ours = (record.member for record in records if self._is_ours(record.graph))
            self._shown = tuple(sorted(ours, key=lambda member: member.key))
        return self._shown

    def foreign(self) -> Record | None:
        """A member of another graph with the same name."""
        return next((record for record in self._records.values() if not self._is_ours(record.graph)), None)

    def foreign_fault(self) -> GraphError | None:
        """The same as an error that says what the two graphs differ in."""
        if (foreign := self.foreign()) is None:
            return None
        member, theirs = foreign.member, self.graphs.get(foreign.graph)
        why = "; ".join(differences(self._graph.shared, theirs)) if theirs is not None else ""
        return GraphError(
            f"{member.key} in {member.cluster} belongs to another graph called {self._graph.name}",
            why=why or "what it differs in is not known",
            fix="start all clusters with the same file; where that one has just ended, try again in a moment",
        )

    def check_graph(self) -> None:
        """Raises it."""
        if (fault := self.foreign_fault()) is not None:
            raise fault

    def _is_ours(self, digest: str) -> bool:
        """It is this graph, or what it was before it was changed, or what it has been changed to."""
        mine = self._graph.digest
        return digest in (mine, *self._graph.succeeds) or mine in self.successors.get(digest, ())

    def _slot(self, key: bytes) -> Slot | None:
        pool, _, index = key.removeprefix(self._members_root).decode(errors="replace").rpartition("/")
        if not key.startswith(self._members_root) or not pool or not index.isdecimal():
            return None
        return pool, int(index)

    def _take_member(self, slot: Slot, value: bytes | None) -> None:
        record = None if value is None else read(value, slot)
        if record is not None and (why := fault(record.member, record.born, self._mark(record.graph))):
            refusals.warning("what etcd has as member %s/%d is forged: %s", *slot, why)
            record = None
        if record is None:
            self._records.pop(slot, None)
        else:
            self._records[slot] = record
            self._kept.pop(slot, None)

    def _mark(self, digest: str) -> GraphMark:
        """What is known of the graph with that digest."""
        if digest == self._graph.digest:
            return self._graph
        return GraphMark(name=self._graph.name, digest=digest, shared=self.graphs.get(digest, {}))

    def _take_successor(self, entry: Entry) -> None:
        digest = entry.key.removeprefix(self._successors_root).decode(errors="replace")
        if entry.value is None:
            self.said.discard(digest)
            return
        try:
            before = decoded(entry.value, tuple[str, ...], GRAPH_LIMIT)
        except ValueError as error:
            refusals.warning("what etcd has as a successor is none: %.200s: %s", entry.key, error)
            return
        self.said.add(digest)
        self.successors[digest] = tuple(dict.fromkeys((*self.successors.get(digest, ()), *before)))[-SUCCESSORS:]

    def _take_graph(self, entry: Entry) -> None:
        digest = entry.key.removeprefix(self._graphs_root).decode(errors="replace")
        if entry.value is None:
            self.graphs.pop(digest, None)
            return
        try:
            self.graphs[digest] = decoded(entry.value, dict[str, Any], GRAPH_LIMIT)
        except ValueError as error:
            refusals.warning("what etcd has as a graph is none: %.200s: %s", entry.key, error)


def read(value: bytes, slot: Slot) -> Record | None:
    """The member in a value; None, and a line in the log, where it is none, or that of another slot."""
    try:
        record = decoded(value, Record, MEMBER_LIMIT)
    except ValueError as error:
        refusals.warning("what etcd has as member %s/%d is none: %s", *slot, error)
        return None
    if slot_of(record.member.key) != slot:
        refusals.warning("what etcd has as member %s/%d is %s", *slot, record.member.key)
        return None
    return record


def slot_of(key: WorkerKey) -> Slot:
    return key.pool, key.index
