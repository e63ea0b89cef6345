"""Promises of fetches from a worker that lays out KV otherwise."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import msgspec
import pytest

from pdd_runtime.errors import CapacityError, LayoutError, TransferError
from pdd_runtime.kv import Block, KvLayout
from pdd_runtime.plugins.messages import Fetched, Fetching, FetchProgress
from pdd_runtime.plugins.transport import BlockSink, TransferReport
from pdd_runtime.worker import converting
from pdd_runtime.worker.converting import Converter
from pdd_runtime.worker.sink import FetchSink
from pdd_runtime.worker.staging import Staging
from tests.waiting import until

BASE = KvLayout(layers=2, kv_heads=2, head_dim=4, dtype="float32", block_size=4)
TOKENS = tuple(range(100, 126))
PAIRS = {
    "larger": ({"block_size": 4}, {"block_size": 8}),
    "smaller": ({"block_size": 8, "tp_size": 2}, {"block_size": 4, "dtype": "bfloat16"}),
    "odd": ({"block_size": 5, "axes": "lkhtd"}, {"block_size": 3, "dtype": "float16", "tp_size": 2}),
    "all at once": ({"block_size": 64, "dtype": "bfloat16"}, {"block_size": 1}),
    "into one": ({"block_size": 1}, {"block_size": 64, "axes": "tlkhd"}),
}
"""What of the layout is otherwise there, and here."""
MakePair = Callable[[Any, Any], AbstractAsyncContextManager[Any]]


@pytest.fixture(params=PAIRS.values(), ids=PAIRS)
async def pair(request: pytest.FixtureRequest, make_pair: MakePair, make_side: Any) -> Any:
    there, here = (msgspec.structs.replace(BASE, **changed) for changed in request.param)
    async with make_pair(make_side(layout=here, blocks=64), make_side(layout=there, blocks=64)) as pair:
        yield pair


@pytest.fixture
async def halves(make_pair: MakePair, make_side: Any) -> Any:
    """Blocks of 4 there, of 8 here."""
    here = msgspec.structs.replace(BASE, block_size=8)
    async with make_pair(make_side(layout=here), make_side(layout=BASE)) as pair:
        yield pair


def blocks_of(pair: Any) -> tuple[int, int]:
    """How many blocks `TOKENS` are there, and here."""
    return len(pair.there.blocks(TOKENS)), len(pair.here.blocks(TOKENS))


async def test_kv_comes_as_it_would_have_been_written_here(pair: Any) -> None:
    pair.there.publish(TOKENS)
    cut_there, cut_here = blocks_of(pair)
    async with pair.fetching(TOKENS) as events:
        assert events[0] == Fetching(blocks_cached=0, blocks_wanted=cut_here)
        assert events[-1].cached_tokens == len(TOKENS)
        assert events[-1].report.blocks == cut_there
        assert events[-1].report.bytes == cut_there * pair.there.info.layout.block_bytes
        assert pair.here.store.stats.used == cut_here
    assert pair.transport.asked[0].layout == pair.there.info.layout
    assert [wanted.name for wanted in pair.transport.asked[0].blocks] == [b.name for b in pair.there.blocks(TOKENS)]
    assert pair.here.cached(TOKENS) == len(TOKENS)
    assert pair.here.bytes_right(TOKENS)
    await pair.unused()


async def test_only_what_covers_the_missing_part_is_moved(pair: Any) -> None:
    there, here = pair.there.info.layout.block_size, pair.here.info.layout.block_size
    pair.there.publish(TOKENS)
    pair.here.publish(TOKENS, 0, 13 // here)
    start = 13 // here * here
    async with pair.fetching(TOKENS) as events:
        assert events[-1].cached_tokens == len(TOKENS)
        assert events[-1].report.blocks == len(pair.there.blocks(TOKENS)) - start // there
    assert pair.here.bytes_right(TOKENS)
    async with pair.fetching(TOKENS) as events:
        assert events == [Fetching(len(pair.here.blocks(TOKENS)), 0), events[-1]]
    await pair.unused()


async def test_blocks_in_any_order_are_committed_in_the_order_of_the_chain(pair: Any) -> None:
    pair.there.publish(TOKENS)
    pair.transport.shuffle = random.Random(5)
    order: list[bytes] = []
    pair.here.store.watch(lambda name, added: order.append(name))
    async with pair.fetching(TOKENS) as events:
        assert events[-1].cached_tokens == len(TOKENS)
    assert order == [block.name for block in pair.here.blocks(TOKENS)]
    assert pair.here.bytes_right(TOKENS)
    await pair.unused()


@pytest.mark.parametrize("come", [0, 1, 3])
async def test_behind_a_block_that_never_comes_nothing_is_kept(pair: Any, come: int) -> None:
    with pair.there.activity.publishing("r"):
        pair.there.publish(TOKENS, 0, come)
    tokens = min(come * pair.there.info.layout.block_size, len(TOKENS))
    whole = [block for block in pair.here.blocks(TOKENS) if block.start + block.tokens <= tokens]
    async with pair.fetching(TOKENS) as events:
        assert events[-1].cached_tokens == sum(block.tokens for block in whole)
        assert events[-1].report.gone == max(0, len(pair.there.blocks(TOKENS)) - come)
        assert pair.here.store.stats.used == len(whole)
    assert pair.here.bytes_right(TOKENS)
    await pair.unused()


async def test_a_block_is_there_as_soon_as_it_is_covered(halves: Any) -> None:
    def here() -> int:
        return len(list(halves.here.store.names()))

    with halves.there.activity.publishing("r"):
        fetch = asyncio.create_task(halves.bring(TOKENS))
        await until(lambda: halves.there.source.feeds == 1)
        for index in range(7):
            halves.there.publish(TOKENS, index, index + 1)
            await until(lambda count=index + 1: halves.transport.moved == count)
            await until(lambda count=index + 1: here() == (count // 2 if count < 7 else 4))
        assert await fetch == len(TOKENS)
    await halves.unused()


async def test_progress_and_report_count_what_crossed_the_network(halves: Any) -> None:
    halves.there.publish(TOKENS)
    halves.transport.gated = True
    seen: list[FetchProgress] = []
    async with aclosing(halves.here.agent.fetch(halves.request(TOKENS), halves.transport)) as events:
        async for event in events:
            if isinstance(event, Fetched):
                break
            seen += [event] if isinstance(event, FetchProgress) else []
            halves.transport.gate.release()
        assert [(each.blocks, each.bytes) for each in seen] == [(n, n * BASE.block_bytes) for n in range(1, 7)]
        assert event.report.bytes == 7 * BASE.block_bytes
    await halves.unused()


async def test_a_layout_that_cannot_become_ours_is_refused_before_anything_is_taken(
    make_pair: MakePair, make_side: Any
) -> None:
    there = msgspec.structs.replace(BASE, rope="none")
    async with make_pair(make_side(layout=BASE), make_side(layout=there)) as pair:
        with pytest.raises(LayoutError, match="rope: none != half") as refused:
            async with pair.fetching(TOKENS):
                pass
        assert str(BASE) in refused.value.why
        assert str(there) in refused.value.why
        assert pair.transport.fetches == 0
        await pair.unused()


async def test_state_comes_with_its_block(make_pair: MakePair, make_side: Any) -> None:
    there = msgspec.structs.replace(BASE, state_bytes=5)
    here = msgspec.structs.replace(there, block_size=8, dtype="bfloat16")
    async with make_pair(make_side(layout=here), make_side(layout=there)) as pair:
        pair.there.publish(TOKENS)
        for number, block in enumerate(pair.there.blocks(TOKENS)):
            there.state(pair.there.store.memory(pair.there.store.find(block.name)))[:] = bytes([number] * 5)
        async with pair.fetching(TOKENS):
            pass
        states = [here.state(pair.here.store.memory(pair.here.store.find(b.name))) for b in pair.here.blocks(TOKENS)]
        assert [bytes(state) for state in states] == [bytes([number] * 5) for number in (1, 3, 5, 6)]


# Long fetches, and many


LONG = tuple(range(1000, 1250))


async def test_a_long_fetch_goes_in_parts_and_moves_every_block_once(make_pair: MakePair, make_side: Any) -> None:
    there = msgspec.structs.replace(BASE, block_size=5)
    staging = 32 * 3 * there.block_bytes
    here = make_side(layout=BASE, blocks=80, staging=staging)
    async with make_pair(here, make_side(layout=there, blocks=80)) as pair:
        pair.there.publish(LONG)
        async with pair.fetching(LONG) as events:
            assert events[-1].cached_tokens == len(LONG)
            assert events[-1].report.blocks == 50
        assert [len(asked.blocks) for asked in pair.transport.asked] == [3] * 16 + [2]
        assert pair.here.bytes_right(LONG)
        await pair.unused()


async def test_a_long_fetch_stops_at_the_part_with_a_gap(make_pair: MakePair, make_side: Any) -> None:
    here = make_side(layout=msgspec.structs.replace(BASE, block_size=8), blocks=80, staging=32 * 4 * BASE.block_bytes)
    async with make_pair(here, make_side(layout=BASE, blocks=80)) as pair:
        with pair.there.activity.publishing("r"):
            pair.there.publish(LONG, 0, 9)
        async with pair.fetching(LONG) as events:
            assert events[-1].cached_tokens == 32
        assert pair.transport.fetches <= 3 + converting.AHEAD
        await pair.unused()


async def test_fetches_together_stay_within_the_memory_to_land_in() -> None:
    """Twenty at once, of which only some find room; all come in the end."""
    source, target = BASE, msgspec.structs.replace(BASE, block_size=6)
    converter = Converter(target, limit=16 * source.block_bytes)
    most = 0

    async def transfer(blocks: Any, sink: BlockSink, behind: int) -> TransferReport:
        nonlocal most
        most = max(most, converter.staged)
        assert behind == 60 // 4 * source.block_bytes - (blocks[-1].start + 4) // 4 * source.block_bytes
        await asyncio.sleep(0)
        for index in range(len(blocks)):
            sink.memory(index)[:] = bytes(source.block_bytes)
            sink.done(index)
        return TransferReport(bytes=1, blocks=len(blocks), gone=0, seconds=1.0, encoding="lossy")

    async def one() -> None:
        whole: list[int] = []
        memory = [memoryview(bytearray(b"\1" * target.block_bytes)) for _ in range(10)]
        loop = asyncio.get_running_loop()
        sink = FetchSink(memory, loop, lambda: None, whole.append)
        conversion = converter.conversion(source)
        assert conversion is not None
        blocks = [Block(b"", b"", start, 4) for start in range(0, 60, 4)]
        report = await converter.receive(conversion, blocks, 0, sink, transfer, loop.time() + 20)
        assert (report.blocks, report.encoding, report.over) == (15, "lossy", "")
        await until(lambda: sorted(whole) == list(range(10)))
        assert not any(any(block) for block in memory)

    await asyncio.gather(*(one() for _ in range(20)))
    assert 0 < most <= 16 * source.block_bytes
    assert converter.staged == 0
    converter.close()


async def test_no_memory_to_land_in_by_the_deadline_is_a_capacity_error(make_pair: MakePair, make_side: Any) -> None:
    here = make_side(layout=msgspec.structs.replace(BASE, block_size=8), staging=8 * BASE.block_bytes)
    async with make_pair(here, make_side(layout=BASE)) as pair:
        pair.transport.gated = True
        others = [tuple(range(start, start + 20)) for start in (1000, 2000, 3000)]
        for tokens in (TOKENS, *others):
            pair.there.publish(tokens)
        held = [asyncio.create_task(pair.bring(tokens, "r")) for tokens in others]
        await until(lambda: pair.transport.fetches == 6)
        with pytest.raises(CapacityError, match=r"could land came in time\n.* have 3072 of 3072"):
            async with pair.fetching(TOKENS, timeout=0.2):
                pass
        pair.transport.gate.release(100)
        assert await asyncio.gather(*held) == [20] * 3
        assert await pair.bring(TOKENS, "r") == len(TOKENS)
        await pair.unused()


async def test_short_fetches_do_not_wait_behind_long_ones(make_pair: MakePair, make_side: Any) -> None:
    here = make_side(layout=msgspec.structs.replace(BASE, block_size=8), blocks=300, staging=64 * 2 * BASE.block_bytes)
    async with make_pair(here, make_side(layout=BASE, blocks=300)) as pair:
        short = LONG[:8]
        pair.there.publish(short)
        with pair.there.activity.publishing("long"):
            elephants = [
                asyncio.create_task(pair.bring(tuple(range(n, n + 250)), "long")) for n in range(5000, 12000, 1000)
            ]
            await until(lambda: pair.transport.fetches == 24)
            async with pair.fetching(short) as events:
                assert events[-1].cached_tokens == len(short)
            assert not any(elephant.done() for elephant in elephants)
        assert await asyncio.gather(*elephants) == [0] * 7
        await pair.unused()


async def test_a_broken_transfer_keeps_what_was_converted(halves: Any) -> None:
    halves.there.publish(TOKENS)
    halves.transport.break_after = 5
    with pytest.raises(TransferError, match="the line broke"):
        async with halves.fetching(TOKENS):
            pass
    await halves.unused()
    assert halves.here.cached(TOKENS) == 16
    assert halves.here.bytes_right(TOKENS)
    assert halves.here.agent._converter.staged == 0


async def test_fetches_closed_at_random_moments_leave_nothing(make_pair: MakePair, make_side: Any) -> None:
    here = make_side(
        layout=msgspec.structs.replace(BASE, block_size=7, tp_size=2), blocks=24, staging=16 * BASE.block_bytes
    )
    async with make_pair(here, make_side(layout=BASE, blocks=200)) as pair:
        await pair.close_at_random(random.Random(17), rounds=15, longest=60)
        await pair.unused()
        assert here.agent._converter.staged == 0


# Memory to land in


async def test_memory_is_given_in_the_order_of_asking() -> None:
    staging, order = Staging(10), []
    until = asyncio.get_running_loop().time() + 5

    async def take(name: str, size: int) -> None:
        async with staging.take(size, until):
            order.append(name)
            assert staging.used <= 10
            await asyncio.sleep(0)

    async with staging.take(6, until):
        waiting = [asyncio.create_task(take(name, size)) for name, size in (("big", 8), ("small", 1), ("whole", 10))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == []
        waiting[1].cancel()
    await asyncio.wait(waiting)
    assert order == ["big", "whole"]
    assert staging.used == 0


async def test_more_than_there_is_comes_alone() -> None:
    staging = Staging(10)
    until = asyncio.get_running_loop().time() + 0.05
    async with staging.take(25, until):
        with pytest.raises(CapacityError, match="other fetches have 25 of 10"):
            async with staging.take(1, until):
                pass
    assert staging.used == 0


async def test_the_largest_pieces_are_kept_and_given_again() -> None:
    staging, until = Staging(100, keep=1), asyncio.get_running_loop().time() + 5
    async with staging.take(5, until) as small, staging.take(20, until) as large:
        small[:], large[:] = b"s" * 5, b"l" * 20
    async with staging.take(10, until) as again, staging.take(5, until) as fresh:
        assert bytes(again) == b"l" * 10
        assert bytes(fresh) == bytes(5)
    async with staging.take(25, until) as larger:
        assert bytes(larger) == bytes(25)
