from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pdd_runtime.discovery import local
from pdd_runtime.errors import DeadlineExceeded, LaunchError, RpcError
from pdd_runtime.plugins.discovery import Member
from tests.waiting import PATIENCE

Make = Callable[..., Member]
Watch = Callable[[Any], Any]


async def test_what_one_process_registers_all_others_see(site: Any, member: Make, watch: Watch) -> None:
    views = [watch(site.discovery()) for _ in range(3)]
    await site.discovery().register(member("main"))
    await site.discovery().register(member("relay"))
    for view in views:
        await view.until("main/0:e1", "relay/0:e1")
        assert view.last[0] == member("main")


async def test_a_registration_is_kept_alive_far_beyond_its_ttl(site: Any, member: Make, watch: Watch) -> None:
    views = watch(site.discovery())
    await site.discovery().register(member())
    await views.until("main/0:e1")
    shown = len(views.all)
    await asyncio.sleep(3 * site.registry.ttl)
    assert len(views.all) == shown


async def test_a_change_of_state_is_seen(site: Any, member: Make, watch: Watch) -> None:
    views = watch(site.discovery())
    discovery = site.discovery()
    for state in ("starting", "ready", "draining"):
        await discovery.register(member(state=state))
        await views.until("main/0:e1" if state == "ready" else f"main/0:e1 {state}")
    assert len(views.all) <= 4


async def test_a_removal_is_seen_without_waiting_for_any_lease(site: Any, member: Make, watch: Watch) -> None:
    site.registry.ttl = 3600.0
    views = watch(site.discovery())
    for pool in ("main", "prefill", "relay"):
        await site.discovery().register(member(pool))
    await views.until("main/0:e1", "prefill/0:e1", "relay/0:e1")
    site.registry.remove(member("prefill").key)
    await views.until("main/0:e1", "relay/0:e1")


async def test_unregister_and_close_take_a_member_out_at_once(site: Any, member: Make, watch: Watch) -> None:
    views = watch(site.discovery())
    one, two = site.discovery(), site.discovery()
    await one.register(member("main"))
    await two.register(member("relay"))
    await views.until("main/0:e1", "relay/0:e1")
    await one.unregister(member("main").key)
    await views.until("relay/0:e1")
    await two.close()
    await views.until()
    await asyncio.sleep(site.registry.ttl)
    assert site.registry.members() == ()


async def test_one_epoch_cannot_unregister_another(site: Any, member: Make) -> None:
    old, new = site.discovery(), site.discovery()
    await old.register(member(epoch="e1"))
    await new.register(member(epoch="e2"))
    await old.unregister(member(epoch="e1").key)
    await site.shows("main/0:e2")


async def test_a_successor_replaces_its_predecessor_which_stays_out(site: Any, member: Make, watch: Watch) -> None:
    views = watch(site.discovery())
    old, new = site.discovery(), site.discovery()
    await old.register(member(epoch="e1"))
    await new.register(member(epoch="e2"))
    await views.until("main/0:e2")
    await asyncio.sleep(2 * site.registry.ttl)
    assert views.all[-1] == ["main/0:e2"]
    with pytest.raises(LaunchError, match="main/0 of epoch e1 has been replaced"):
        await old.register(member(epoch="e1"))
    await site.shows("main/0:e2")


async def test_members_and_watchers_outlive_a_restart_of_the_registry(site: Any, member: Make, watch: Watch) -> None:
    views = watch(site.discovery())
    for pool in ("main", "relay"):
        await site.discovery().register(member(pool))
    await views.until("main/0:e1", "relay/0:e1")
    shown = len(views.all)
    await site.down()
    await asyncio.sleep(2 * site.registry.ttl)
    await site.up()
    await site.shows("main/0:e1", "relay/0:e1")
    await asyncio.sleep(2 * site.registry.ttl)
    assert views.all[shown:] == []
    await site.discovery().register(member("prefill"))
    await views.until("main/0:e1", "prefill/0:e1", "relay/0:e1")


async def test_who_died_while_the_registry_was_away_leaves_the_view_when_it_is_back(
    site: Any, member: Make, watch: Watch
) -> None:
    views = watch(site.discovery())
    dying = site.discovery()
    await dying.register(member("main"))
    await site.discovery().register(member("relay"))
    await views.until("main/0:e1", "relay/0:e1")
    await site.down()
    await dying.close()
    await site.up()
    await views.until("relay/0:e1")


async def test_a_successor_holds_its_place_over_a_restart_of_the_registry(site: Any, member: Make) -> None:
    old, new = site.discovery(), site.discovery()
    await old.register(member(epoch="e1"))
    await asyncio.sleep(0.01)
    await new.register(member(epoch="e2"))
    await site.down()
    await site.up()
    await site.shows("main/0:e2")
    await asyncio.sleep(site.registry.ttl)
    await site.shows("main/0:e2")


STALLING = """
import asyncio
from pdd_runtime.discovery import RegistryServer
from pdd_runtime.rpc import Greeting, RpcServer

async def main():
    server = RpcServer(Greeting(graph="g", secret="hush-hush", cluster="dc-a", name="launcher"))
    registry = RegistryServer(server, ttl=1.5)
    print(await server.start("127.0.0.1"), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_a_registry_process_that_is_stopped_for_two_ttls_loses_nobody(
    site: Any, member: Make, watch: Watch
) -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", STALLING, stdout=asyncio.subprocess.PIPE)
    try:
        assert child.stdout is not None
        site.address = (await child.stdout.readline()).decode().strip()
        views = watch(site.discovery())
        for index in range(3):
            await site.discovery().register(member(index=index))
        everybody = [f"main/{index}:e1" for index in range(3)]
        await views.until(*everybody)
        shown = len(views.all)
        os.kill(child.pid, signal.SIGSTOP)
        await asyncio.sleep(3)
        os.kill(child.pid, signal.SIGCONT)
        await asyncio.sleep(2)
        assert views.all[shown:] == []
        await site.discovery().register(member("relay"))
        await views.until(*everybody, "relay/0:e1")
    finally:
        child.kill()
        await child.wait()


async def test_registering_while_the_registry_is_away_waits_for_it(site: Any, member: Make) -> None:
    discovery = site.discovery()
    await site.down()
    task = asyncio.create_task(discovery.register(member()))
    await asyncio.sleep(0.3)
    assert not task.done()
    await site.up()
    await asyncio.wait_for(task, PATIENCE)
    await site.shows("main/0:e1")


async def test_a_registry_that_stays_away_is_an_error_and_is_told_when_it_is_back(
    site: Any, member: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "REGISTER_TIMEOUT", 0.3)
    discovery = site.discovery()
    await site.down()
    with pytest.raises(DeadlineExceeded, match="the registry did not take main/0"):
        await discovery.register(member())
    await site.up()
    await site.shows("main/0:e1")


async def test_a_wrong_secret_is_told_at_once(site: Any, member: Make) -> None:
    with pytest.raises(RpcError, match="do not share a secret"):
        await site.discovery(secret="wrong").register(member())


async def test_watching_begins_before_the_registry_does(site: Any, member: Make, watch: Watch) -> None:
    await site.down()
    views = watch(site.discovery())
    await asyncio.sleep(0.3)
    assert views.all == []
    await site.up()
    await site.discovery().register(member())
    await views.until("main/0:e1")


async def test_closing_ends_its_watches(site: Any, watch: Watch) -> None:
    discovery = site.discovery()
    views = watch(discovery)
    await views.until()
    await discovery.close()
    await discovery.close()
    await asyncio.wait_for(views.task, PATIENCE)


async def test_the_plugin_registers_it_by_the_name_local() -> None:
    (cls,) = local.pdd_register_discoveries()
    assert cls.name == "local"
    with pytest.raises(ValueError, match="endpoints"):
        cls.Config.model_validate({"endpoints": ["x"]})
