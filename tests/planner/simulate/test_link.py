"""How simulated transfers share a link."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from pdd_tcp.scheduler import Scheduler
from pdd_tcp.scheduler import Transfer as Queued

from pdd_runtime.planner.simulate.events import Events
from pdd_runtime.planner.simulate.link import LinkModel, SimLink

MB = 1e6
LINE = 100 * MB


@dataclass(frozen=True)
class Sent:
    """One transfer that a test makes: it can be sent in `parts` equal parts, `apart` seconds from each other."""

    at: float
    size: float
    parts: int = 1
    apart: float = 0.0


def simulate(model: LinkModel, transfers: list[Sent]) -> list[float]:
    """When each has arrived."""
    events = Events()
    link = SimLink(events, model)
    arrived = [0.0] * len(transfers)

    def begin(place: int, sent: Sent) -> None:
        def done() -> None:
            arrived[place] = events.now

        transfer = link.open(sent.size, done)
        for part in range(sent.parts):
            events.push(sent.at + part * sent.apart, transfer.add, sent.size / sent.parts)

    for place, sent in enumerate(transfers):
        events.push(sent.at, begin, place, sent)
    events.run()
    assert link.sent == pytest.approx(sum(sent.size for sent in transfers))
    assert link.arrived == len(transfers)
    assert (link.queue, link.using, link.rate) == pytest.approx((0, 0, 0), abs=1e-3)
    return arrived


def frame_by_frame(transfers: list[Sent], frame: int) -> list[float]:
    """When the last byte of each has left a line on which the transport's own scheduler lets in frame after frame."""
    scheduler = Scheduler(small=2 << 20, ageing=0.1)
    queued = [Queued(int(sent.size), sent.at) for sent in transfers]
    now, left = 0.0, [0.0] * len(transfers)
    while any(each.left for each in queued):
        can: dict[Queued, int] = {}
        for each, sent in zip(queued, transfers, strict=True):
            made = sum(now >= sent.at + part * sent.apart for part in range(sent.parts)) * each.size // sent.parts
            if made > each.size - each.left:
                can[each] = made - (each.size - each.left)
        chosen = scheduler.pick(list(can))
        if chosen is None:
            now += frame / LINE
            continue
        nbytes = min(frame, can[chosen])
        scheduler.sent(chosen, nbytes)
        now += nbytes / LINE
        left[queued.index(chosen)] = now
    return left


def some(number: int, *, parts: int = 1) -> list[Sent]:
    draw = random.Random(number)
    at, transfers = 0.0, []
    for _ in range(30):
        at += draw.expovariate(1.0 / 0.05)
        size = round(draw.choice((0.5, 1.0, 5.0, 10.0, 40.0)) * draw.uniform(0.5, 1.5) * MB)
        transfers.append(Sent(at, size, parts, 0.03))
    return transfers


@pytest.mark.parametrize(("number", "parts"), [(0, 1), (1, 1), (2, 4), (3, 4)])
def test_shortest_first_is_what_the_transport_does(number: int, parts: int) -> None:
    transfers = some(number, parts=parts)
    simulated = simulate(LinkModel(LINE, 0.0), transfers)
    real = frame_by_frame(transfers, 40_000)
    took = [(a - sent.at, b - sent.at) for a, b, sent in zip(simulated, real, transfers, strict=True)]
    assert max(b for _, b in took) > 1.0, "nobody waited"
    for a, b in took:
        assert a == pytest.approx(b, rel=0.02, abs=0.02)


def shared_equally(most: float, transfers: list[Sent]) -> list[float]:
    """When each has left a line that all share, from one change to the next."""
    left = {place: sent.size for place, sent in enumerate(transfers)}
    now, ended = 0.0, [0.0] * len(transfers)
    while left:
        there = [place for place in left if transfers[place].at <= now]
        coming = min((transfers[place].at for place in left if transfers[place].at > now), default=float("inf"))
        if not there:
            now = coming
            continue
        rate = min(most, LINE / len(there))
        seconds = min(coming - now, min(left[place] for place in there) / rate)
        now = coming if seconds == coming - now else now + seconds
        for place in there:
            left[place] -= rate * seconds
            if left[place] < 1e-3:
                del left[place]
                ended[place] = now
    return ended


@pytest.mark.parametrize("flow_rate", [None, 30 * MB])
@pytest.mark.parametrize("number", range(3))
def test_fair_sharing_gives_all_the_same(number: int, flow_rate: float | None) -> None:
    transfers = some(number)
    model = LinkModel(LINE, 0.1, flow_rate=flow_rate, discipline="fair")
    expected = [ended + 0.05 for ended in shared_equally(flow_rate or LINE, transfers)]
    assert simulate(model, transfers) == pytest.approx(expected)


def test_a_transfer_alone_takes_its_bytes_at_its_rate_and_half_a_round_trip() -> None:
    for discipline in ("shortest", "fair", "fifo"):
        model = LinkModel(LINE, 0.1, flow_rate=5 * MB, streams=4, discipline=discipline)
        assert simulate(model, [Sent(1.0, 40 * MB)]) == pytest.approx([1.0 + 2.0 + 0.05])
        assert simulate(model, [Sent(1.0, 0.0)]) == pytest.approx([1.05])


def test_what_is_made_slowly_is_sent_as_it_is_made() -> None:
    for discipline in ("shortest", "fair", "fifo"):
        model = LinkModel(LINE, 0.0, discipline=discipline)
        assert simulate(model, [Sent(0.0, 40 * MB, parts=4, apart=1.0)]) == pytest.approx([3.1])
        # Faster than the line: it is the line that takes its time.
        assert simulate(model, [Sent(0.0, 40 * MB, parts=4, apart=0.01)]) == pytest.approx([0.4])


def test_a_short_transfer_hardly_waits_for_a_long_one_which_moves_all_the_same() -> None:
    long, *short = simulate(LinkModel(LINE, 0.0), [Sent(0.0, 400 * MB), *(Sent(k, 90 * MB) for k in range(1, 12))])
    # The oldest has a tenth of the line, and they the rest.
    assert short == pytest.approx([k + 1.0 for k in range(1, 12)])
    assert long == pytest.approx(1.0 + 11.0 + (400 - 100 - 110) / 100)


def test_without_ageing_the_longest_waits_for_all_others() -> None:
    model = LinkModel(LINE, 0.0, ageing=0.0)
    long, *_ = simulate(model, [Sent(0.0, 201 * MB), *(Sent(k, 100 * MB) for k in range(1, 12))])
    assert long == pytest.approx(13.01)


def test_connections_that_are_slow_leave_room_for_others() -> None:
    model = LinkModel(LINE, 0.0, flow_rate=40 * MB, ageing=0.0)
    # The two shortest at 40 each, the third at what is left, until there is room.
    assert simulate(model, [Sent(0.0, size * MB) for size in (40, 80, 100)]) == pytest.approx([1.0, 2.0, 3.0])
    # The oldest has its tenth besides, however long it is.
    aged = LinkModel(LINE, 0.0, flow_rate=45 * MB)
    assert simulate(aged, [Sent(0.0, size * MB) for size in (100, 45, 45)]) == pytest.approx([1 + 90 / 45, 1.0, 1.0])


@pytest.mark.parametrize("discipline", ["fair", "fifo"])
def test_who_finds_no_connection_waits_for_the_one_that_ends_first(discipline: str) -> None:
    model = LinkModel(LINE, 0.0, flow_rate=10 * MB, streams=2, connections=4, discipline=discipline)  # type: ignore[arg-type]
    arrived = simulate(model, [Sent(0.0, size * MB) for size in (20, 40, 20, 20)])
    assert arrived == pytest.approx([1.0, 2.0, 2.0, 3.0])


def test_with_shared_connections_the_shortest_has_them() -> None:
    model = LinkModel(LINE, 0.0, flow_rate=10 * MB, connections=2, ageing=0.0)
    arrived = simulate(model, [Sent(0.0, size * MB) for size in (30, 20, 10)])
    assert arrived == pytest.approx([4.0, 2.0, 1.0])


@pytest.mark.parametrize("discipline", ["shortest", "fair", "fifo"])
def test_a_cancelled_transfer_leaves_its_share_to_the_others(discipline: str) -> None:
    events = Events()
    link = SimLink(events, LinkModel(LINE, 0.0, discipline=discipline))  # type: ignore[arg-type]
    ended: list[tuple[str, float]] = []
    first = link.open(100 * MB, lambda: ended.append(("first", events.now)))
    second = link.open(100 * MB, lambda: ended.append(("second", events.now)))
    first.add(100 * MB)
    second.add(100 * MB)
    events.push(0.5, first.cancel)
    events.push(0.6, first.cancel)
    events.run()
    assert [name for name, _ in ended] == ["second"]
    assert ended[0][1] * LINE == pytest.approx(link.sent)
    assert 0.0 < first.sent < 51 * MB
    assert link.queue == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("discipline", ["shortest", "fair", "fifo"])
def test_a_line_that_is_cut_goes_on_where_it_was(discipline: str) -> None:
    events = Events()
    link = SimLink(events, LinkModel(LINE, 0.0, discipline=discipline))  # type: ignore[arg-type]
    ended: list[float] = []
    for size in (30 * MB, 60 * MB):
        link.open(size, lambda: ended.append(events.now)).add(size)
    events.push(0.2, link.set_bandwidth, 0.0)
    events.push(1.2, link.set_bandwidth, LINE)
    events.run(1.0)
    assert (link.sent, link.queue, link.rate) == pytest.approx((20 * MB, 70 * MB, 0.0))
    events.run()
    assert ended[-1] == pytest.approx(1.9)


def test_its_counters_tell_what_was_sent_waits_and_how_fast_it_went() -> None:
    events = Events()
    link = SimLink(events, LinkModel(LINE, 0.1, flow_rate=50 * MB))
    assert link.goodput is None
    transfer = link.open(200 * MB, lambda: None)
    transfer.add(100 * MB)
    events.push(1.0, lambda: None)
    events.run(1.0)
    assert (link.sent, link.queue, link.busy) == pytest.approx((50 * MB, 50 * MB, 0.5))
    assert link.goodput == pytest.approx(50 * MB)
    events.run()
    transfer.add(500 * MB)  # No more than was said.
    events.run()
    assert (link.sent, link.queue, link.busy) == pytest.approx((200 * MB, 0.0, 2.0))
    assert link.goodput == pytest.approx(50 * MB)


@pytest.mark.parametrize(
    "wrong", [{"bandwidth": 0.0}, {"rtt": -1.0}, {"flow_rate": 0.0}, {"streams": 0}, {"streams": 3, "connections": 2}]
)
def test_a_link_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="no such link"):
        LinkModel(**{"bandwidth": LINE, "rtt": 0.1, **wrong})  # type: ignore[arg-type]
