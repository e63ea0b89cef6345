"""Whose turn it is: by priority, then by fair shares among tenants, then by arrival. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar


class Asking(Protocol):
    """What waits."""

    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> int:
        """Lower ones come first, whoever asks."""
        ...

    @property
    def cost(self) -> float:
        """Tokens that it will probably take."""
        ...


A = TypeVar("A", bound=Asking)
REMEMBERED = 4096
"""Tenants of which is known how much they had; of more, those who had least are forgotten."""


class FairQueue(Generic[A]):
    """Start-time fair queueing (Goyal, Vin, Cheng 1996), with the turn of each tenant as its one number: how many
    tokens it was served, over its weight. The next is always of the tenant that was served least. One that was idle
    starts at the number of the last who came: idle time earns nothing, and what was used while nobody else wanted it
    costs nothing.

    So of two tenants who always wait, neither is ever ahead of its share by more than its one largest request.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Tenants without a weight have 1."""
        self._weights = weights
        self._lines: dict[int, dict[str, dict[A, None]]] = {}
        self._served: dict[str, float] = {}
        self._now = 0.0
        """Where the last who came had stood."""
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[A]:
        """All that wait, tenant by tenant."""
        return (asking for tenants in self._lines.values() for line in tenants.values() for asking in line)

    def lengths(self) -> dict[str, int]:
        """How many wait, by tenant."""
        lengths: dict[str, int] = {}
        for tenants in self._lines.values():
            for tenant, line in tenants.items():
                lengths[tenant] = lengths.get(tenant, 0) + len(line)
        return lengths

    def put(self, asking: A) -> None:
        """Behind those of its tenant and priority."""
        tenant = asking.tenant
        if not any(tenant in tenants for tenants in self._lines.values()):
            self._arrive(tenant)
        self._lines.setdefault(asking.priority, {}).setdefault(tenant, {})[asking] = None
        self._len += 1

    def first(self) -> A:
        """Whose turn it is. Not to be asked where nobody waits."""
        tenants = self._lines[min(self._lines)]
        return next(iter(tenants[min(tenants, key=self._served.__getitem__)]))

    def last(self) -> A:
        """Who gives way where too many wait: of the least urgent, of the tenant who has most waiting for its weight,
        the newest."""
        tenants = self._lines[max(self._lines)]
        longest = max(tenants, key=lambda tenant: (len(tenants[tenant]) / self.weight(tenant), self._served[tenant]))
        return next(reversed(tenants[longest]))

    def take(self, asking: A) -> None:
        """It has its turn, and leaves the queue."""
        self.remove(asking)
        self.pass_by(asking.tenant, asking.cost, waited=True)

    def pass_by(self, tenant: str, cost: float, *, waited: bool = False) -> None:
        """`cost` tokens for the tenant, without a place in the queue."""
        if not waited:
            self._arrive(tenant)
        begun = self._served[tenant]
        self._now = max(self._now, begun)
        self._served[tenant] = begun + cost / self.weight(tenant)

    def correct(self, tenant: str, more: float) -> None:
        """It took so many tokens more than was thought; fewer: below 0."""
        if tenant in self._served:
            self._served[tenant] += more / self.weight(tenant)

    def remove(self, asking: A) -> None:
        """It does not wait any more. Nothing happens where it does not."""
        tenants = self._lines.get(asking.priority, {})
        line = tenants.get(asking.tenant, {})
        if asking in line:
            del line[asking]
            self._len -= 1
            if not line:
                del tenants[asking.tenant]
            if not tenants:
                del self._lines[asking.priority]

    def ahead(self, tenant: str, priority: int) -> int:
        """How many will about have their turn before one that comes now, if all cost the same."""
        count = 0
        for urgency, tenants in self._lines.items():
            if urgency < priority:
                count += sum(map(len, tenants.values()))
            elif urgency == priority:
                own = len(tenants.get(tenant, ()))
                turns = (own + 1) / self.weight(tenant)
                count += own + sum(
                    min(len(line), math.floor(turns * self.weight(other)))
                    for other, line in tenants.items()
                    if other != tenant
                )
        return count

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def _arrive(self, tenant: str) -> None:
        self._served[tenant] = max(self._served.get(tenant, 0.0), self._now)
        if len(self._served) > REMEMBERED:
            kept = {name: self._served[name] for name in (*self.lengths(), tenant)}
            most = sorted(self._served.items(), key=lambda had: had[1], reverse=True)[: REMEMBERED // 2]
            self._served = dict(most) | kept


class DrainRate:
    """How many a second leave the queue, over the last seconds in which any waited."""

    SPAN = 5.0
    """Seconds after which what was seen counts for a third."""
    FORGETS = 30.0
    """The same, while none waits."""
    LEAST = 0.5
    """Seconds of waiting after which something is known."""

    def __init__(self) -> None:
        self._count = self._time = self._at = self._last = 0.0
        self._waiting = False

    def step(self, at: float, left: int, waiting: bool) -> None:
        """At `at`, `left` of them leave for a worker, and from now on some wait, or none."""
        self._to(at)
        self._count += left
        if left or not waiting or not self._waiting:
            self._last = at
        self._waiting = waiting

    def per_second(self, at: float) -> float | None:
        """None: not known."""
        self._to(at)
        return self._count / self._time if self._time >= self.LEAST and self._count else None

    def stuck(self, at: float) -> float:
        """Seconds since one left, or the first came."""
        return at - self._last

    def _to(self, at: float) -> None:
        kept = math.exp((self._at - at) / (self.SPAN if self._waiting else self.FORGETS))
        self._count *= kept
        self._time *= kept
        if self._waiting:
            self._time += self.SPAN * (1.0 - kept)
        self._at = at
