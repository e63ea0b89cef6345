"""An answer says what its sessions made, at the end of the turn in which they did."""

from __future__ import annotations

import asyncio

import pytest

from pdd_runtime.frontend.bell import Bell, ClientGone, Turn, Write


class Sayer:
    """Says straight away what was made, while it can."""

    def __init__(self, said: list[str], name: str, turn: Turn) -> None:
        self._said, self._name = said, name
        self.bell = Bell(turn)
        self.made = 0
        self.can = True

    def make(self) -> None:
        self.made += 1
        self.bell.ring()

    def straight(self) -> Write | None:
        if not self.can:
            return None
        self._said.append(f"{self._name} makes {self.made}")
        self.made = 0
        return lambda: self._said.append(f"{self._name} writes")


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_is_made_in_one_turn_is_said_once_and_written_when_all_have_made_theirs() -> None:
    said: list[str] = []
    turn = Turn()
    a, b = Sayer(said, "a", turn), Sayer(said, "b", turn)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(sayer.bell.wait(sayer.straight)) for sayer in (a, b)]
        await turns()
        a.make()
        b.make()
        a.make()
        assert said == []
        await turns()
        assert said == ["a makes 2", "b makes 1", "a writes", "b writes"]
        b.make()
        await turns()
        assert said[4:] == ["b makes 1", "b writes"]
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()


async def test_who_waits_is_woken_where_it_cannot_be_said_straight_away() -> None:
    said: list[str] = []
    sayer = Sayer(said, "a", Turn())
    sayer.can = False
    async with asyncio.TaskGroup() as group:
        task = group.create_task(sayer.bell.wait(sayer.straight))
        await turns()
        sayer.make()
        await task
    assert said == []
    # Made while nobody waits: the next wait ends at once.
    sayer.make()
    await sayer.bell.wait(sayer.straight)
    assert said == []


async def test_what_was_made_before_a_failure_is_said_first() -> None:
    said: list[str] = []
    sayer = Sayer(said, "a", Turn())
    waiting = asyncio.create_task(sayer.bell.wait(sayer.straight))
    await turns()
    sayer.make()
    sayer.bell.fail(ValueError("the first"))
    sayer.bell.fail(ValueError("the second"))
    with pytest.raises(ValueError, match="the first"):
        await waiting
    assert said == ["a makes 1", "a writes"]

    sayer = Sayer(said, "b", Turn())
    sayer.make()
    sayer.bell.fail(ValueError("later"))
    await sayer.bell.wait()
    with pytest.raises(ValueError, match="later"):
        await sayer.bell.wait()


async def test_nothing_is_said_to_a_client_that_has_gone() -> None:
    bell = Bell(Turn())
    bell.ring()
    bell.fail(ClientGone())
    with pytest.raises(ClientGone):
        await bell.wait()


async def test_what_cannot_be_made_fails_its_own_answer_alone() -> None:
    said: list[str] = []
    turn = Turn()

    def broken() -> Write | None:
        raise ValueError("no such token")

    bell, sayer = Bell(turn), Sayer(said, "a", turn)
    failing = asyncio.create_task(bell.wait(broken))
    going_on = asyncio.create_task(sayer.bell.wait(sayer.straight))
    await turns()
    bell.ring()
    sayer.make()
    await turns()
    assert said == ["a makes 1", "a writes"]
    with pytest.raises(ValueError, match="no such token"):
        await failing
    going_on.cancel()
