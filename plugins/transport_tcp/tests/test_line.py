"""An emulated line is as slow as it says, no slower, and shared fairly."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec
import pytest
from pdd_tcp.config import TcpConfig
from pdd_tcp.link import LARGEST_CHUNK, Link
from pdd_tcp.wire import FRAME_BYTES, SMALLEST_FRAME

from pdd_runtime.clock import now
from pdd_runtime.rpc import Line
from pdd_runtime.testing.kv_parties import LAYOUT, StoreSink, StoreSource, sequence, subscription
from plugins.transport_tcp.tests.counting import Party

LARGE = msgspec.structs.replace(LAYOUT, layers=32)


class Entry(NamedTuple):
    nbytes: int
    called_at: float
    entered_at: float
    leaves_at: float
    arrives_at: float


class RecordedLine(Line):
    def __init__(self, bandwidth: float, delay: float, jitter: float = 0.0) -> None:
        super().__init__(bandwidth, delay, jitter)
        self.entries: list[Entry] = []

    def reserve(self, nbytes: int, now_: float) -> tuple[float, float]:
        called_at = now()
        leaves_at, arrives_at = super().reserve(nbytes, now_)
        self.entries.append(Entry(nbytes, called_at, now_, leaves_at, arrives_at))
        return leaves_at, arrives_at

    @property
    def bytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def waited_for_nothing(self) -> bool:
        """Each entered a line that was free: nobody queued in it."""
        return all(
            entry.leaves_at - entry.entered_at == pytest.approx(entry.nbytes * 8 / self.bandwidth, rel=1e-6)
            for entry in self.entries
        )


async def transfer(party: Party, line: RecordedLine, blocks: int) -> tuple[StoreSink, list[float], float, float]:
    """Returns the sink, when each block was done, and the fetch's begin and end."""
    source, wanted = StoreSource(LARGE), sequence(blocks, LARGE)
    source.make(wanted)
    endpoint = await party("dc-a", {"dc-b": line}).serve(source, "127.0.0.1")
    times: list[float] = []
    sink = StoreSink(wanted, LARGE, on_done=lambda index: times.append(now()))
    begun = now()
    await party("dc-b").fetch(endpoint, subscription(wanted, layout=LARGE), sink)
    return sink, times, begun, now()


async def test_delay_and_rate_are_respected(party: Party) -> None:
    line = RecordedLine(200e6, delay=0.04)
    sink, times, begun, ended = await transfer(party, line, 8)
    assert sink.whole
    assert line.entries[0].called_at - begun >= 0.04, "the subscription crossed the line, too"
    passed, done = 0, iter(times)
    for entry in line.entries:
        before, passed = passed, passed + entry.nbytes
        if before and before // LARGE.block_bytes < passed // LARGE.block_bytes:
            # The chunk that completes a block; headers make it a little later still.
            assert next(done) >= entry.arrives_at - LARGEST_CHUNK * 8 / line.bandwidth
    assert times[-1] >= max(entry.arrives_at for entry in line.entries if entry.nbytes > 1000), "headers aside"
    assert ended - begun >= 2 * 0.04 + line.bytes * 8 / line.bandwidth


async def test_a_long_line_is_filled(party: Party) -> None:
    """4 MB are under way, more than any buffer of ours holds, and each byte enters when the one before has left. One
    frame at a time would fill a quarter of it. Of a few tries the best counts: a machine that is too busy for longer
    than the slack costs rate."""
    best = 0.0
    for _ in range(5):
        line = RecordedLine(160e6, delay=0.1)
        await transfer(party, line, 16)
        busy = line.entries[-1].leaves_at - line.entries[0].entered_at
        best = max(best, line.bytes * 8 / line.bandwidth / busy)
        if best >= 0.98:
            break
    assert 0.6 <= best <= 1.001


async def test_fetches_take_turns_and_never_queue_in_the_line(party: Party) -> None:
    """So a message that shares it waits for one chunk at most."""
    line = RecordedLine(400e6, delay=0.01)
    source = StoreSource(LARGE)
    endpoint = await party("dc-a", {"dc-b": line}).serve(source, "127.0.0.1")
    receiver, lists = party("dc-b"), [sequence(6, LARGE, salt=f"tenant-{n}") for n in range(4)]
    sinks = [StoreSink(wanted, LARGE) for wanted in lists]
    async with asyncio.TaskGroup() as group:
        for number, (wanted, sink) in enumerate(zip(lists, sinks, strict=True)):
            source.make(wanted)
            asked = subscription(wanted, layout=LARGE, request_id=f"req-{number}")
            group.create_task(receiver.fetch(endpoint, asked, sink))
    assert all(sink.whole for sink in sinks)
    assert line.waited_for_nothing()
    assert max(entry.nbytes for entry in line.entries) <= LARGEST_CHUNK + FRAME_BYTES
    for one, following in zip(line.entries, line.entries[1:], strict=False):
        assert following.called_at >= one.leaves_at


async def test_jitter_keeps_order(party: Party) -> None:
    line = RecordedLine(400e6, delay=0.005, jitter=0.02)
    sink, *_ = await transfer(party, line, 6)
    assert sink.whole


async def test_only_the_way_to_another_cluster_is_emulated(party: Party) -> None:
    line = RecordedLine(1e3, delay=10)
    source, wanted = StoreSource(), sequence(4)
    source.make(wanted)
    endpoint = await party("dc-a", {"dc-b": line}).serve(source, "127.0.0.1")
    sink = StoreSink(wanted)
    await party("dc-a").fetch(endpoint, subscription(wanted, cluster="dc-a"), sink)
    assert sink.whole
    assert line.entries == []


async def test_cancelling_frees_pins_of_blocks_under_way(party: Party) -> None:
    line = RecordedLine(50e6, delay=0.05)
    source, wanted = StoreSource(LARGE), sequence(40, LARGE)
    source.make(wanted)
    loop, first = asyncio.get_running_loop(), asyncio.Event()
    sink = StoreSink(wanted, LARGE, on_done=lambda index: loop.call_soon_threadsafe(first.set))
    endpoint = await party("dc-a", {"dc-b": line}).serve(source, "127.0.0.1")
    task = asyncio.create_task(party("dc-b").fetch(endpoint, subscription(wanted, layout=LARGE), sink))
    await first.wait()
    assert source.pinned > 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(source.wait_for_feeds, 0)
    assert source.pinned == 0
    assert line.bytes < 20 * LARGE.block_bytes


@pytest.mark.parametrize(
    ("bandwidth", "frame"), [(1e5, SMALLEST_FRAME), (40e6, 25_000), (1e9, LARGEST_CHUNK), (1e11, LARGEST_CHUNK)]
)
def test_a_frame_is_small_on_a_slow_line(bandwidth: float, frame: int) -> None:
    assert Link("dc-b", None, Line(bandwidth, delay=0.0), TcpConfig()).frame(1) == frame
