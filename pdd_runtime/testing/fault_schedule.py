"""When which fault comes: by chance, and the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from pdd_runtime.errors import PddError
from pdd_runtime.graph import Graph, nearest

T = TypeVar("T")

Kind = Literal["kill", "hang", "cut", "cluster", "etcd", "disk"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MEANING: Mapping[Kind, str] = {
    "kill": "a worker is killed (SIGKILL)",
    "hang": "a worker stands still (SIGSTOP), and goes on later",
    "cut": "an emulated link lets nothing through for a while",
    "cluster": "all workers of a cluster are killed at once",
    "etcd": "discovery's etcd is killed, and comes back empty",
    "disk": "the launcher cannot write logs for a while",
}


class FaultError(PddError):
    """A fault that cannot be made in this graph."""

    code = "fault"


@dataclass(frozen=True)
class Fault:
    """One fault."""

    kind: Kind
    target: str
    """`pool/index`, a link or a cluster; empty for what there is only one of."""
    at: float
    """Seconds from the beginning."""
    seconds: float
    """How long it lasts; of those that are over at once, 0."""

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.3g} s" if self.seconds else ""
        return " ".join(part for part in (self.kind, self.target) if part) + lasts


def targets(graph: Graph, kind: Kind) -> tuple[str, ...]:
    """What a fault of that kind can strike. Workers only: users of a frontend that dies know it by their connection."""
    spec = graph.spec
    match kind:
        case "kill" | "hang":
            return tuple(f"{name}/{index}" for name, pool in spec.pools.items() for index in range(pool.replicas))
        case "cut":
            return tuple(name for name, link in spec.links.items() if link.emulate)
        case "cluster":
            # Where the frontend stands, nobody would be left to see it.
            return tuple(name for name in spec.clusters if (name,) != graph.frontend_clusters)
        case "etcd":
            return ("",) if spec.discovery.plugin == "etcd" else ()
        case "disk":
            return ("",)


def schedule(
    graph: Graph, kinds: Sequence[str], span: float, every: float, lasting: float, seed: int
) -> tuple[Fault, ...]:
    """A fault about `every` seconds, of the `kinds` in a random order in which each comes as often, for `span` seconds;
    the first not before half of `every`, the last early enough to be over. `lasting`: seconds of those that last.
    Raises `FaultError` where there is no such kind, or the graph has nothing for it to strike."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        fix = nearest(unknown[0], KINDS)
        raise FaultError(f'there is no fault "{unknown[0]}"', why=f"they are: {', '.join(KINDS)}", fix=fix)
    chosen = [kind for kind in KINDS if kind in kinds]
    if idle := [kind for kind in chosen if not targets(graph, kind)]:
        raise FaultError(f'graph {graph.name} has nothing for the fault "{idle[0]}"', why=_LACKS[idle[0]])
    chance = random.Random(f"{seed}/faults")
    faults: list[Fault] = []
    bag: list[Kind] = []
    left: dict[Kind, list[str]] = {kind: [] for kind in chosen}
    at = every * chance.uniform(0.5, 1.0)
    while chosen:
        bag = bag or _shuffled(chance, chosen)
        kind = bag.pop()
        seconds = lasting if kind in _LASTING else 0.0
        if at + seconds > span:
            break
        left[kind] = left[kind] or _shuffled(chance, targets(graph, kind))
        faults.append(Fault(kind, left[kind].pop(), at, seconds))
        at += every * chance.uniform(0.75, 1.25)
    return tuple(faults)


def _shuffled(chance: random.Random, names: Sequence[T]) -> list[T]:
    return chance.sample(list(names), len(names))


_LASTING: frozenset[Kind] = frozenset({"hang", "cut", "etcd", "disk"})
_LACKS: Mapping[Kind, str] = {
    "kill": "it has no workers",
    "hang": "it has no workers",
    "cut": "only links with emulate: true can be cut",
    "cluster": "it has no cluster beside the frontend's",
    "etcd": "its discovery is not etcd",
    "disk": "it has no launcher",
}
