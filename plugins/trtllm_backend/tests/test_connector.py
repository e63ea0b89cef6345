"""The connector in the stand-in's executor, which calls it in TensorRT-LLM's order, with a real worker's bridge."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from pdd_connector.trtllm import publisher, scheduler
from pdd_trtllm.testing.driver import STREAM
from pdd_trtllm.testing.serve import PAUSE
from pdd_trtllm.testing.task import Task

from pdd_runtime.kv import BlockStore
from plugins.trtllm_backend.tests.rig import GREEDY, PAGE, Request, Rig, bridged, layout, rigged
from tests.waiting import until

WAYS = [(True, 1), (False, 1), (True, 2)]
"""Passes overlap or not, and ranks."""


def text(n: int, which: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(which).choices(range(3, 200), k=n))


@pytest.fixture
def socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: None) -> Path:
    monkeypatch.setenv("PDD_SOCKET", str(tmp_path / "agent"))
    return tmp_path / "agent"


@pytest_asyncio.fixture(params=WAYS, ids=["overlapped", "one by one", "two ranks"])
async def rig(request: pytest.FixtureRequest, tiny: Path, socket: Path) -> AsyncGenerator[Rig, None]:
    overlap, tp = request.param
    async with rigged(tiny, socket, overlap=overlap, tp=tp) as rig:
        yield rig


def same(rig: Rig, one: Request, other: Request, tokens: int) -> bool:
    return np.array_equal(rig.rows(one.blocks, tokens), rig.rows(other.blocks, tokens))


async def test_a_prompt_is_published_in_parts_and_whole(rig: Rig) -> None:
    """Three passes; the last block is filled in part, and nothing stands behind its tokens."""
    prompt = text(7 * PAGE + 3)
    async with rig.request(prompt, 1, room=len(prompt)) as request:
        await until(lambda: request.said("written") == len(prompt))
        await until(lambda: request.finish)
        written = [notice.tokens for notice in request.notices if notice.kind == "written"]
        assert written == sorted(written)
        assert all(tokens % PAGE == 0 for tokens in written[:-1])
        assert request.planned.tokens == request.planned.local == 0
    tail = rig.store.layout.elements(rig.store.memory(request.blocks[-1]))
    assert tail[:, :, :3].all(axis=(2, 3, 4, 5)).any()
    assert not tail[:, :, 3:].any()


async def test_what_was_decoded_is_published_but_for_the_last_token(rig: Rig) -> None:
    """Its KV was never computed. What is published is what a prefill of the same tokens makes."""
    decoded = await rig.run(text(2 * PAGE + 1), 2 * PAGE + 3)
    assert len(decoded.made) == 2 * PAGE + 3
    assert decoded.said("finished") == len(decoded.all) - 1
    async with rig.request((*decoded.all[:-1], 5), 1) as again:
        await until(lambda: again.said("written") == len(decoded.all))
    assert same(rig, decoded, again, len(decoded.all) - 1)


async def test_offered_kv_is_loaded_with_its_tail_and_the_rest_is_computed(tiny: Path, socket: Path) -> None:
    prompt = text(4 * PAGE + 5)
    async with rigged(tiny, socket) as rig:
        first = await rig.run(prompt, 6)
        offer = rig.rows(first.blocks, len(prompt))
        blocks, expected = [bytes(rig.store.memory(block)) for block in first.blocks], first.made
    async with rigged(tiny, socket) as rig:
        taken = rig.store.allocate(len(blocks))
        for block, data in zip(taken, blocks, strict=True):
            rig.store.memory(block)[:] = data
        known = (*prompt, *expected[:2])
        there = await rig.run(known, 4, offered=len(prompt), blocks=taken)
        assert there.planned.tokens == there.said("loaded") == len(prompt)
        assert there.made == expected[2:]
        assert rig.executor.computed == 2 + 3, "more was computed than the two known tokens and three of the new"
        assert np.array_equal(rig.rows(there.blocks, len(prompt)), offer)


async def test_kv_of_other_tokens_gives_other_tokens(tiny: Path, socket: Path) -> None:
    """So the tests here prove what they say: the engine computes with what lies in its pages."""
    prompt, known = text(3 * PAGE, 1), text(2, 3)
    async with rigged(tiny, socket) as rig:
        expected = await rig.alone(prompt + known, 12)
    async with rigged(tiny, socket) as rig:
        other = await rig.run(text(3 * PAGE, 2), 1)
        wrong = await rig.run(prompt + known, 12, offered=len(prompt), blocks=other.blocks[:3])
    assert wrong.said("loaded") == len(prompt)
    assert wrong.made != expected


async def test_the_last_token_is_computed_though_all_are_offered(rig: Rig) -> None:
    prompt = text(2 * PAGE)
    first = await rig.run(prompt, 3)
    taken = rig.store.allocate(2)
    for block, source in zip(taken, first.blocks, strict=False):
        rig.store.memory(block)[:] = rig.store.memory(source)
    again = await rig.run(prompt, 3, offered=2 * PAGE, blocks=taken)
    assert again.planned.local + again.planned.tokens == 2 * PAGE - 1
    assert again.made == first.made


async def test_what_the_engine_has_itself_is_not_loaded(rig: Rig) -> None:
    prompt = text(3 * PAGE + 1)
    first = await rig.run(prompt, 1)
    taken = rig.store.allocate(2)
    async with rig.request(prompt, 2, offered=2 * PAGE, blocks=taken) as again:
        await until(lambda: again.finish)
    assert (again.planned.local, again.planned.tokens) == (3 * PAGE, 0)
    assert again.said("loaded") is None
    assert again.made[:1] == first.made


async def test_pages_that_the_engine_found_itself_are_published_as_well(rig: Rig) -> None:
    prompt = text(3 * PAGE + 1)
    first = await rig.run(prompt, 1)
    second = await rig.run(prompt, 1)
    assert second.planned.local == 3 * PAGE
    assert second.said("written") == len(prompt)
    assert same(rig, first, second, len(prompt))


async def test_several_at_once_each_have_their_own(rig: Rig) -> None:
    """Also those of the same tokens, whose pages the engine computes for each."""
    prompts = [text(20, 1), text(33, 2), text(20, 1), text(9, 3), text(20, 1)]
    alone = {prompt: await rig.alone(prompt, 12) for prompt in set(prompts)}
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(rig.run(prompt, 12)) for prompt in prompts]
    for prompt, task in zip(prompts, tasks, strict=True):
        request = task.result()
        assert request.made == alone[prompt]
        assert request.said("finished") == len(prompt) + 11
        assert same(rig, request, tasks[prompts.index(prompt)].result(), len(prompt) + 11)


async def test_requests_of_others_are_left_alone(rig: Rig) -> None:
    prompt = text(2 * PAGE + 3)
    async with rig.request(text(5, 9), 1) as ours:
        assert len(await rig.alone(prompt, 3)) == 3
        await until(lambda: ours.finish)
    assert rig.executor.error is None


async def test_an_abort_leaves_nothing_and_writes_no_more(rig: Rig) -> None:
    prompt = text(2 * PAGE)
    async with rig.request(prompt, 300, room=320) as request:
        await until(lambda: len(request.made) > 3)
    before = [bytes(rig.store.memory(block)) for block in request.blocks]
    made = len(request.made)
    await until(lambda: len(request.made) > made + PAGE)
    assert [bytes(rig.store.memory(block)) for block in request.blocks] == before, (
        "written after the worker took it back"
    )
    rig.executor.cancel(request.number)
    await until(lambda: request.finish == "cancelled")
    assert len((await rig.run(prompt, 5)).made) == 5


async def test_the_tail_of_a_request_that_goes_on_is_published_where_it_is_asked_for_and_nothing_behind_it(
    tiny: Path, socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next page would be full in a second and a half."""
    monkeypatch.setenv(PAUSE, "0.3")
    prompt = text(PAGE + 1)
    async with rigged(tiny, socket) as rig, rig.request(prompt, 20, room=3 * PAGE) as request:
        await until(lambda: len(request.made) >= 2)
        end = len(prompt) + 2
        rig.bridge.tail("t-1", end)
        await until(lambda: request.said("written") == end)
        made = len(request.made)
        await until(lambda: len(request.made) >= made + PAGE)
        assert request.said("written") == end
        assert not rig.rows(request.blocks, 3 * PAGE)[end:].any()
        rig.executor.cancel(request.number)


async def test_pages_of_an_aborted_request_are_not_published_as_its_own(tiny: Path, socket: Path) -> None:
    """The engine says nothing of an abort, and gives the pages to others; what the worker is told stays true."""
    async with rigged(tiny, socket, pages=20) as rig:
        for which in range(8):
            prompt = text(2 * PAGE + 1, which)
            async with rig.request(prompt, 90, room=110) as request:
                await until(lambda request=request, which=which: len(request.made) > 20 + which)
                rig.executor.cancel(request.number)
                others = await asyncio.gather(*(rig.alone(text(5 * PAGE, 100 + 3 * which + n), 30) for n in range(3)))
                assert [len(made) for made in others] == [30] * 3
                await until(lambda request=request: request.said("finished") is not None)
                said = max(request.said("written") or 0, request.said("finished") or 0)
                assert said >= len(prompt)
                async with rig.request((*request.all[:said], 5), 1) as clean:
                    await until(lambda clean=clean, said=said: (clean.said("written") or 0) > said)
                assert same(rig, request, clean, said)
            rig.store.release(request.blocks)
            rig.store.release(clean.blocks)


async def test_blocks_are_let_go_of_though_the_pass_that_loaded_them_is_the_engines_last(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where main extends behind a relay, and nothing else runs there."""
    monkeypatch.setattr(scheduler, "HOLD", 600.0)
    prompt = text(3 * PAGE + 1)
    other = await rig.run(text(3 * PAGE, 7), 1)
    async with rig.request(prompt, 1, offered=3 * PAGE, blocks=other.blocks[:3]) as request:
        await until(lambda: request.finish)
    assert request.said("loaded") == 3 * PAGE
    assert not rig.bridge.broken.done()


async def test_blocks_that_come_late_are_written_and_the_pages_wait_for_them(rig: Rig) -> None:
    prompt = text(PAGE)
    async with rig.request(prompt, 2 * PAGE + 2, room=PAGE) as request:
        await until(lambda: request.finish)
        assert rig.executor.error is None
        more = rig.store.allocate(3)
        request.blocks += more
        rig.bridge.add("t-1", tuple(more), ())
        await until(lambda: request.said("finished") is not None)
        assert request.said("finished") == len(request.all) - 1


async def test_blocks_that_never_come_end_the_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "LAST_BLOCKS", 0.2)
    prompt = text(PAGE + 2)
    async with rig.request(prompt, 2 * PAGE, room=2 * PAGE) as request:
        await until(lambda: request.said("finished") is not None)
    assert request.said("finished") == 2 * PAGE
    assert len(await rig.alone(prompt, 3)) == 3


async def test_where_nothing_is_wanted_it_is_loaded_and_no_more(rig: Rig) -> None:
    """A decode whose worker had no room for more."""
    prompt = text(2 * PAGE + 4)
    expected = (await rig.run(prompt, 1)).made
    other = await rig.run(text(2 * PAGE + 4, 5), 1)
    async with rig.request((*other.tokens, 7), 3, offered=PAGE, blocks=other.blocks[:1], wanted=False) as request:
        await until(lambda: request.said("finished") is not None)
    assert request.said("finished") == PAGE
    assert len(request.made) == 3
    assert expected == await rig.alone(prompt, 1)


async def test_a_worker_that_goes_leaves_the_engine_at_work_and_another_takes_over(tiny: Path, socket: Path) -> None:
    prompt = text(3 * PAGE + 1)
    async with rigged(tiny, socket) as rig:
        alone = await rig.alone(prompt, 60)
        async with rig.request(text(3 * PAGE + 1, 4), 60, room=90) as request:
            await until(lambda: len(request.made) > 3)
            await rig.bridge.close()
            await until(lambda: request.finish)
        assert len(request.made) == 60
        assert await rig.alone(prompt, 60) == alone
        store = BlockStore(layout(tiny, tp=1), 64, shared=True)
        async with bridged(store, socket) as bridge:
            async with asyncio.timeout(30):
                await bridge.ready()
            served = await Rig(bridge, store, rig.executor).run(prompt, 60)
            assert served.made == alone
            assert served.said("finished") == len(prompt) + 59


async def test_blocks_stay_as_they_are_from_the_plan_to_the_load(rig: Rig) -> None:
    """The worker's client may be gone in between: its engine then computes with what it was promised all the same, and
    other requests find it in the engine's cache."""
    rig.executor.stop()
    driver = rig.executor._driver
    assert driver is not None
    prompt = text(2 * PAGE + 1)
    gone: list[asyncio.Task[None]] = []

    async def leave(using: AsyncGenerator[Request, None]) -> None:
        await using.aclose()

    blocks = rig.store.allocate(3)
    task = Task(1, list(prompt), 1, GREEDY, True, lambda tokens, finish: None)

    async def announced() -> AsyncGenerator[Request, None]:
        async with rig.request(prompt, 1, offered=2 * PAGE, blocks=blocks) as request:
            yield request

    using = announced()
    await anext(using)
    assert await asyncio.to_thread(driver.scheduler.get_num_new_matched_tokens, task, 0) == (2 * PAGE, False)
    gone.append(asyncio.create_task(leave(using)))
    task.held.pages = [0, 1, 2]
    task.computed = 2 * PAGE
    driver._external[1] = 2 * PAGE
    await asyncio.sleep(0.3)
    assert not gone[0].done(), "the worker may give the blocks to others, and they are not loaded yet"
    await asyncio.to_thread(driver.begin_pass, [(task, 1)], [])
    for worker in driver.workers:
        worker.wait_for_save(STREAM)
    await asyncio.to_thread(driver.begin_pass, [], [])
    await until(gone[0].done)
