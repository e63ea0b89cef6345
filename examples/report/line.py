"""A line that transfers share, with a pool of connections: each transfer's wait for one, and its time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from pdd_runtime.planner import Workload
from pdd_runtime.planner.simulate.events import Events
from pdd_runtime.planner.simulate.link import LinkModel, SimLink


@dataclass(frozen=True)
class Carried:
    """What became of some transfers, and of others that were sent among them."""

    size: NDArray[np.float64]
    """Bytes."""
    waits: NDArray[np.float64]
    """Seconds for a connection."""
    times: NDArray[np.float64]
    """Seconds from then on."""
    used: float
    """Share of the connections that arrivals found in use."""
    probes: NDArray[np.float64]
    """Seconds of the others, which need no connection of the pool."""


def payloads(workload: Workload, seed: int, kv: tuple[float, float], fresh: float = 1.0) -> Iterator[float]:
    """Bytes of KV that main lacks, where it has cached what prefill has: a constant, and some for each token. `fresh`
    scales how many tokens that are."""
    constant, token = kv
    for session in workload.stream(seed):
        yield constant + token * fresh * session.turns[0].fresh


def carry(
    sizes: Sequence[float], rate: float, link: LinkModel, seed: int, *, probe: float = 0.0, every: int = 20
) -> Carried:
    """Send them at `rate` a second (Poisson); with every so many of them goes another one, of `probe` bytes."""
    count = len(sizes)
    due = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count)).tolist()
    waits, times, used = np.zeros(count), np.zeros(count), np.zeros(count)
    probes: list[float] = []
    events = Events()
    line = SimLink(events, LinkModel(link.bandwidth, link.rtt, link.flow_rate, discipline=link.discipline))
    places = link.connections or count
    taken = 0
    queue: deque[int] = deque()

    def begin(number: int) -> None:
        began = events.now
        waits[number] = began - due[number]
        send(sizes[number], lambda: end(number, began))

    def end(number: int, began: float) -> None:
        nonlocal taken
        times[number] = events.now - began
        if queue:
            begin(queue.popleft())
        else:
            taken -= 1

    def send(size: float, done: object) -> None:
        line.open(size, done).add(size)  # type: ignore[arg-type]

    def arrive(number: int) -> None:
        nonlocal taken
        used[number] = taken / places
        if taken < places:
            taken += 1
            begin(number)
        else:
            queue.append(number)
        if probe and number % every == 0:
            began = events.now
            send(probe, lambda: probes.append(events.now - began))

    for number, at in enumerate(due):
        events.push(at, arrive, number)
    events.run()
    return Carried(np.asarray(sizes), waits, times, float(used.mean()), np.asarray(probes))


def first(sizes: Iterator[float], count: int) -> list[float]:
    return list(islice(sizes, count))
