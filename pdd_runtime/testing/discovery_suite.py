"""The conformance suite for discoveries. Subclass it in your tests and name your class:

```python
class TestMyDiscovery(DiscoveryConformance):
    plugin = MyDiscovery

    @pytest.fixture
    def config(self) -> BaseModel:
        return MyDiscovery.Config(endpoints=["127.0.0.1:2379"])
```

It is run with the defaults of `MyDiscovery.Config` unless the fixture `config` says otherwise, and must find nobody
registered. A fixture `outage` that can take the servers away and bring them back allows one test more.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any, ClassVar, Protocol

import pytest
import pytest_asyncio
from pydantic import BaseModel

from pdd_runtime.errors import PddError
from pdd_runtime.plugins.discovery import Discovery, GraphMark, Member
from pdd_runtime.plugins.routing import WorkerKey

PATIENCE = 10.0
"""Seconds after which a view counts as not coming."""
PROMPT = 2.0
"""Seconds in which one who says goodbye is gone for all."""

GRAPH = GraphMark(name="demo", digest="d1", shared={"clusters": ["dc-a"]})
"""Whose processes the suite plays."""

Join = Callable[[], Discovery]


class Outage(Protocol):
    """The servers behind a discovery."""

    async def down(self) -> None: ...

    async def up(self) -> None: ...


def member(pool: str = "main", index: int = 0, epoch: str = "1", state: Any = "ready") -> Member:
    return Member(
        key=WorkerKey(pool, index, epoch),
        role="main",
        cluster="dc-a",
        state=state,
        pid=1,
        endpoint="127.0.0.1:1",
        transports={"tcp": "127.0.0.1:2"},
    )


def named(member: Member) -> str:
    """As the tests write it: pool/index:epoch, and the state unless it is ready."""
    return f"{member.key}:{member.key.epoch}" + ("" if member.state == "ready" else f" {member.state}")


class Views:
    """What one watcher has been shown; the last view can be waited for."""

    def __init__(self, discovery: Discovery) -> None:
        self.all: list[list[str]] = []
        self.last: tuple[Member, ...] = ()
        self._new = asyncio.Event()
        self.task = asyncio.create_task(self._read(discovery))

    async def until(self, *names: str, seconds: float | None = None) -> None:
        """Return when exactly these are there."""
        seconds = PATIENCE if seconds is None else seconds
        try:
            async with asyncio.timeout(seconds):
                while not self.all or self.all[-1] != sorted(names):
                    self._new.clear()
                    await self._new.wait()
        except TimeoutError:
            raise AssertionError(f"after {seconds} s the view is {self.all[-1:]}, not {sorted(names)}") from None

    async def _read(self, discovery: Discovery) -> None:
        async for members in discovery.watch():
            self.last = members
            self.all.append(sorted(named(each) for each in members))
            self._new.set()


Watch = Callable[[Discovery], Views]


@pytest.mark.asyncio
class DiscoveryConformance:
    """What every discovery promises."""

    plugin: ClassVar[type[Discovery]]

    @pytest.fixture
    def config(self) -> BaseModel:
        return self.plugin.Config.model_validate({})

    @pytest_asyncio.fixture
    async def address(self) -> AsyncGenerator[str, None]:
        """Where the graph's launcher answers; "" for a discovery whose config names its servers."""
        yield ""

    @pytest.fixture
    def secret(self) -> str:
        return "hush-hush"

    @pytest_asyncio.fixture
    async def outage(self) -> AsyncGenerator[Outage | None, None]:
        """What takes the servers away; None: nothing here can."""
        yield None

    @pytest_asyncio.fixture
    async def join(self, config: BaseModel, address: str, secret: str) -> AsyncGenerator[Join, None]:
        """Makes a discovery as each process of the graph has it; closes them at the end."""
        made: list[Discovery] = []

        def make() -> Discovery:
            made.append(self.plugin(config, address, secret, GRAPH))
            return made[-1]

        yield make
        for discovery in made:
            await discovery.close()

    @pytest_asyncio.fixture
    async def watch(self) -> AsyncGenerator[Watch, None]:
        watching: list[Views] = []

        def start(discovery: Discovery) -> Views:
            watching.append(Views(discovery))
            return watching[-1]

        yield start
        for views in watching:
            views.task.cancel()
            await asyncio.wait([views.task])

    async def test_a_watcher_is_told_at_once_even_that_nobody_is_there(self, join: Join, watch: Watch) -> None:
        await watch(join()).until()

    async def test_what_one_registers_all_others_see(self, join: Join, watch: Watch) -> None:
        views = [watch(join()) for _ in range(3)]
        await join().register(member("main"))
        await join().register(member("relay"))
        late = watch(join())
        for view in (*views, late):
            await view.until("main/0:1", "relay/0:1")
            assert member("main") in view.last, "a member is to be seen as it was registered"

    async def test_one_process_may_register_several(self, join: Join, watch: Watch) -> None:
        views, discovery = watch(join()), join()
        await discovery.register(member("main"))
        await discovery.register(member("relay"))
        await views.until("main/0:1", "relay/0:1")
        await discovery.unregister(member("main").key)
        await views.until("relay/0:1")

    async def test_a_change_of_state_is_seen(self, join: Join, watch: Watch) -> None:
        views, discovery = watch(join()), join()
        for state in ("starting", "ready", "draining"):
            await discovery.register(member(state=state))
            await views.until("main/0:1" if state == "ready" else f"main/0:1 {state}")

    async def test_nothing_is_shown_while_nothing_changes(self, join: Join, watch: Watch) -> None:
        views, discovery = watch(join()), join()
        await discovery.register(member())
        await views.until("main/0:1")
        shown = len(views.all)
        for _ in range(3):
            await discovery.renew(member())
        await discovery.register(member("relay"))
        await views.until("main/0:1", "relay/0:1")
        assert len(views.all) == shown + 1, "a renewal is no change"

    async def test_unregister_and_close_take_a_member_out_soon(self, join: Join, watch: Watch) -> None:
        views, one, two = watch(join()), join(), join()
        await one.register(member("main"))
        await two.register(member("relay"))
        await views.until("main/0:1", "relay/0:1")
        await one.unregister(member("main").key)
        await views.until("relay/0:1", seconds=PROMPT)
        await one.unregister(member("main").key)
        await two.close()
        await views.until(seconds=PROMPT)
        await two.close()

    async def test_a_successor_replaces_its_predecessor(self, join: Join, watch: Watch) -> None:
        views, old, new = watch(join()), join(), join()
        await old.register(member(epoch="1"))
        await new.register(member(epoch="2"))
        await views.until("main/0:2")
        with suppress(PddError):
            await old.register(member(epoch="1"))
        await old.unregister(member(epoch="1").key)
        await new.register(member("relay"))
        await views.until("main/0:2", "relay/0:1")
        assert views.all[-1] == ["main/0:2", "relay/0:1"], "a predecessor took its successor's place, or took it out"

    async def test_who_is_killed_expires_and_who_lives_is_kept(
        self, config: BaseModel, address: str, secret: str, join: Join, watch: Watch
    ) -> None:
        """A process that registers and is killed, beside one that only waits."""
        views = watch(join())
        await join().register(member("main"))
        await views.until("main/0:1")
        shown = len(views.all)
        child = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "pdd_runtime.testing.discovery_member"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(_order(self.plugin, config, address, secret))
            await child.stdin.drain()
            async with asyncio.timeout(2 * PATIENCE):
                assert await child.stdout.readline() == b"registered\n", "the other process could not register"
            await views.until("main/0:1", "relay/0:1")
        finally:
            child.kill()
            await child.wait()
        # It expires when it has not renewed for `ttl` seconds; a busy machine needs a moment more.
        await views.until("main/0:1", seconds=2 * self.plugin.ttl + PATIENCE)
        assert all("main/0:1" in view for view in views.all[shown:]), "who is alive was taken for dead"

    async def test_members_and_watchers_outlive_an_outage(
        self, outage: Outage | None, join: Join, watch: Watch
    ) -> None:
        if outage is None:
            pytest.skip("give the fixture `outage`, which takes the servers away and brings them back")
        views, one = watch(join()), join()
        await one.register(member("main"))
        await views.until("main/0:1")
        shown = len(views.all)
        await outage.down()
        await asyncio.sleep(0.5)
        await outage.up()
        await join().register(member("relay"))
        await views.until("main/0:1", "relay/0:1")
        assert all("main/0:1" in view for view in views.all[shown:]), "the last view stays valid"


def _order(cls: type[Discovery], config: BaseModel, address: str, secret: str) -> bytes:
    """What the member process is to do, as a line for its standard input."""
    if not cls.__qualname__.isidentifier():
        pytest.skip(f"another process cannot import {cls.__qualname__}: make the class at the top of its module")
    order = {
        "module": cls.__module__,
        "file": inspect.getfile(cls),
        "cls": cls.__qualname__,
        "config": config.model_dump(mode="json", by_alias=True),
        "address": address,
        "secret": secret,
    }
    return json.dumps(order).encode() + b"\n"
