"""Who of several transfers sends over a link, and how fast."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pdd_runtime.planner.simulate.events import Handle
    from pdd_runtime.planner.simulate.link import SimLink, Transfer


class Sharing(Protocol):
    """What a link asks of it. Rates change only in here."""

    def begin(self, transfer: Transfer) -> None:
        """It has something to send, and had not."""

    def more(self, transfer: Transfer) -> None:
        """It has more to send."""

    def end(self, transfer: Transfer) -> None:
        """It is to send nothing more."""

    def leave(self, transfer: Transfer) -> None:
        """It needs no connections any more."""

    def changed(self) -> None:
        """The line's bandwidth has."""


class Places:
    """Connections, which transfers hold from their first byte to their last."""

    def __init__(self, link: SimLink) -> None:
        self._link, self._most = link, link.model.places
        self._waiting: deque[Transfer] = deque()

    def take(self, transfer: Transfer) -> bool:
        """It has its connections. False: it will have them when others leave."""
        if not transfer.place:
            if self._link.using >= self._most:
                self._waiting.append(transfer)
                return False
            transfer.place = True
            self._link.using += 1
        return True

    def leave(self, transfer: Transfer) -> Transfer | None:
        """Give its connections to the one that has waited longest, which can begin now, if there is one."""
        if not transfer.place:
            return None
        transfer.place = False
        while self._waiting:
            other = self._waiting.popleft()
            if other.active:
                other.place = True
                return other
        self._link.using -= 1
        return None


class Fair:
    """Processor sharing: O(log n) an event. All send at one rate, so what each has sent since it began is one number,
    and who is through next is the head of a heap."""

    def __init__(self, link: SimLink) -> None:
        self._link, self._most = link, link.model.transfer_rate
        self._places = Places(link)
        self._sending = 0
        self._level = 0.0
        """Bytes that one who has been sending all the time would have sent by `_at`."""
        self._at = 0.0
        self._rate = 0.0
        self._heap: list[tuple[float, int, Transfer]] = []
        """(level at which it has sent all that it can, …); a transfer's `key` tells which entry is its own."""
        self._timer: Handle | None = None

    def begin(self, transfer: Transfer) -> None:
        if self._places.take(transfer):
            self._advance()
            self._enter(transfer)
            self._share()

    def more(self, transfer: Transfer) -> None:
        if transfer.key is not None:
            self._advance()
            # What it has sent is only known at its end: it lacks as much more as has been made.
            transfer.at, more = transfer.made, transfer.made - transfer.at
            self._push(transfer, transfer.key + more)  # type: ignore[operator]
            self._share()

    def end(self, transfer: Transfer) -> None:
        if transfer.key is not None:
            self._advance()
            transfer.sent = transfer.made - max(0.0, transfer.key - self._level)  # type: ignore[operator]
            transfer.key = None
            self._sending -= 1
            self._share()

    def leave(self, transfer: Transfer) -> None:
        other = self._places.leave(transfer)
        if other is not None:
            self._advance()
            self._enter(other)
            self._share()

    def changed(self) -> None:
        self._advance()
        self._share()

    def _enter(self, transfer: Transfer) -> None:
        self._sending += 1
        transfer.at = transfer.made
        self._push(transfer, self._level + transfer.made - transfer.sent)

    def _push(self, transfer: Transfer, level: float) -> None:
        transfer.key = level
        heappush(self._heap, (level, transfer.number, transfer))

    def _advance(self) -> None:
        now = self._link.events.now
        self._level += self._rate * (now - self._at)
        self._at = now

    def _share(self) -> None:
        """All get their rate; the next to have sent all sets the timer."""
        link, heap = self._link, self._heap
        if self._timer is not None:
            link.events.cancel(self._timer)
            self._timer = None
        link.flow()
        if not self._sending:
            self._rate = self._level = link.rate = 0.0
            heap.clear()
            return
        while heap[0][2].key != heap[0][0]:
            heappop(heap)
        self._rate = min(self._most, link.bandwidth / self._sending)
        link.rate = self._rate * self._sending
        if self._rate > 0.0:
            seconds = max(0.0, heap[0][0] - self._level) / self._rate
            self._timer = link.events.at(link.events.now + seconds, self._exhausted)

    def _exhausted(self) -> None:
        self._timer = None
        self._at = self._link.events.now
        level, _, transfer = heappop(self._heap)
        self._level = level
        transfer.key, transfer.active, transfer.sent = None, False, transfer.made
        self._sending -= 1
        if transfer.made >= transfer.size:
            self._link.finish(transfer)
            other = self._places.leave(transfer)
            if other is not None:
                self._enter(other)
        self._share()


class Ordered:
    """One after the other: shortest first with ageing, or first come, first served. While the line has room for all,
    an event concerns one transfer; else those that send, and the next."""

    def __init__(self, link: SimLink) -> None:
        model = link.model
        self._link, self._most = link, model.transfer_rate
        self._fifo, self._small = model.discipline == "fifo", model.small
        self._ageing = 0.0 if self._fifo else model.ageing
        self._places = Places(link) if self._fifo else None
        self._slots = model.places
        self._sending: dict[Transfer, None] = {}
        self._waiting: list[tuple[tuple[bool, float, int], Transfer]] = []
        """A heap of those that have something to send and no rate, by their key."""
        self._waits = 0
        self._ages: list[tuple[int, Transfer]] = []
        """A heap of all that have something to send, oldest first, and of some that had."""

    def begin(self, transfer: Transfer) -> None:
        if self._places is None or self._places.take(transfer):
            self._enter(transfer)

    def more(self, transfer: Transfer) -> None:
        if transfer in self._sending:
            self._settle(transfer)
            self._time(transfer)

    def end(self, transfer: Transfer) -> None:
        if transfer in self._sending:
            self._settle(transfer)
            self._quiet(transfer)
            del self._sending[transfer]
        elif transfer.key is not None:
            transfer.key = None
            self._waits -= 1
        self._next()

    def leave(self, transfer: Transfer) -> None:
        if self._places is not None:
            other = self._places.leave(transfer)
            if other is not None:
                self._enter(other)

    def changed(self) -> None:
        self._share()

    def _enter(self, transfer: Transfer) -> None:
        transfer.at = self._link.events.now
        if not transfer.aged:
            transfer.aged = True
            self._oldest()  # Those that are through go from there.
            heappush(self._ages, (transfer.number, transfer))
        self._sending[transfer] = None
        n = len(self._sending)
        if not self._waits and n <= self._slots and self._fits(n):
            self._set(transfer, min(self._most, self._link.bandwidth))
            self._link.using = n if self._places is None else self._link.using
        else:
            self._share()

    def _fits(self, n: int) -> bool:
        return n == 1 or n * self._most <= self._link.bandwidth

    def _next(self) -> None:
        """One has left. Where there was room for all, the others go on as they were."""
        n = len(self._sending)
        if self._waits or not self._fits(n + 1):
            self._share()
        else:
            self._link.flow()
            if self._places is None:
                self._link.using = n

    def _share(self) -> None:
        """Give the line away anew."""
        link = self._link
        sending = self._sending
        for transfer in sending:
            self._settle(transfer)
        order = sorted(sending, key=self._key)
        oldest = self._oldest()
        room, slots = link.bandwidth, self._slots
        owed = 0.0
        if oldest is not None and self._ageing:
            owed = min(self._most, self._ageing * room)
            room -= owed
            slots -= 1
        chosen: dict[Transfer, float] = {}
        place = 0
        while room > 0.0:
            first = order[place] if place < len(order) else None
            while self._waiting and self._waiting[0][1].key != self._waiting[0][0]:
                heappop(self._waiting)
            if self._waiting and (first is None or self._waiting[0][0] < self._key(first)):
                if slots <= 0 and not (owed and self._waiting[0][1] is oldest):
                    break
                transfer = heappop(self._waiting)[1]
                transfer.key = None
                self._waits -= 1
            elif first is not None:
                if slots <= 0 and not (owed and first is oldest):
                    break
                transfer = first
                place += 1
            else:
                break
            rate = min(self._most, room)
            if transfer is oldest and owed:
                rate, owed = min(self._most, room + owed), 0.0
                room = room + min(self._most, self._ageing * link.bandwidth) - rate
            else:
                room -= rate
                slots -= 1
            chosen[transfer] = rate
        if owed and oldest is not None and oldest not in chosen:
            chosen[oldest] = owed
            if oldest.key is not None:
                oldest.key = None
                self._waits -= 1
        for transfer in order:
            if transfer not in chosen:
                self._set(transfer, 0.0)
                transfer.key = self._key(transfer)
                heappush(self._waiting, (transfer.key, transfer))
                self._waits += 1
        for transfer, rate in chosen.items():
            transfer.at = link.events.now
            self._set(transfer, rate)
        self._sending = dict.fromkeys(chosen)
        if self._places is None:
            link.using = len(chosen)

    def _key(self, transfer: Transfer) -> tuple[bool, float, int]:
        if self._fifo:
            return (False, 0.0, transfer.number)
        return (transfer.size > self._small, transfer.size - transfer.sent, transfer.number)

    def _oldest(self) -> Transfer | None:
        while self._ages and not self._ages[0][1].active:
            heappop(self._ages)[1].aged = False
        return self._ages[0][1] if self._ages else None

    def _settle(self, transfer: Transfer) -> None:
        now = self._link.events.now
        transfer.sent = min(transfer.made, transfer.sent + transfer.rate * (now - transfer.at))
        transfer.at = now

    def _set(self, transfer: Transfer, rate: float) -> None:
        if rate != transfer.rate:
            self._link.flow()
            self._link.rate += rate - transfer.rate
            transfer.rate = rate
            self._time(transfer)

    def _time(self, transfer: Transfer) -> None:
        link = self._link
        if transfer.timer is not None:
            link.events.cancel(transfer.timer)
            transfer.timer = None
        if transfer.rate > 0.0:
            seconds = (transfer.made - transfer.sent) / transfer.rate
            transfer.timer = link.events.at(link.events.now + seconds, self._exhausted, transfer)

    def _quiet(self, transfer: Transfer) -> None:
        link = self._link
        link.flow()
        link.rate -= transfer.rate
        transfer.rate = 0.0
        if transfer.timer is not None:
            link.events.cancel(transfer.timer)
            transfer.timer = None

    def _exhausted(self, transfer: Transfer) -> None:
        transfer.timer = None
        transfer.sent, transfer.active = transfer.made, False
        self._quiet(transfer)
        del self._sending[transfer]
        if transfer.made >= transfer.size:
            self._link.finish(transfer)
            self.leave(transfer)
        self._next()
