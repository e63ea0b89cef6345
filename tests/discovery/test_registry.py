from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from pdd_runtime.clock import now
from pdd_runtime.discovery.registry import Receipt, Registration
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.rpc import Greeting, RpcConnection, connect
from tests.waiting import PATIENCE

Make = Callable[..., Member]


async def dial(site: Any) -> RpcConnection:
    return await connect(site.address, Greeting(graph="", secret="hush-hush", cluster="", name="test"))


async def offer(connection: RpcConnection, member: Member, born: float) -> bool:
    receipt = await connection.call("discovery.register", Registration(member, born), Receipt, timeout=PATIENCE)
    return receipt.accepted


async def test_a_member_that_does_not_renew_is_gone_after_the_ttl(site: Any, member: Make) -> None:
    connection = await dial(site)
    began = now()
    await offer(connection, member(), began)
    assert site.registry.members() == (member(),)
    await site.shows()
    assert now() - began >= site.registry.ttl
    await connection.close()


async def test_members_expire_one_by_one_each_in_its_time(site: Any, member: Make) -> None:
    connection = await dial(site)
    # Longer than a stall of this process, after which the registry would give both the same time.
    site.registry.ttl = 2.0
    await offer(connection, member("main"), now())
    await asyncio.sleep(site.registry.ttl / 2)
    await offer(connection, member("relay"), now())
    await site.shows("relay/0:e1")
    await site.shows()
    await connection.close()


async def test_the_newer_epoch_replaces_the_older_whose_renewals_are_refused_from_then_on(
    site: Any, member: Make
) -> None:
    connection = await dial(site)
    assert await offer(connection, member(epoch="zz-older"), 100.0)
    assert await offer(connection, member(epoch="aa-newer"), 101.0)
    assert not await offer(connection, member(epoch="zz-older"), 100.0)
    await site.shows("main/0:aa-newer")
    await connection.close()


async def test_the_older_epoch_stays_out_after_the_newer_has_gone(site: Any, member: Make) -> None:
    connection = await dial(site)
    assert await offer(connection, member(epoch="newer"), 101.0)
    await site.shows()
    assert not await offer(connection, member(epoch="older"), 100.0)
    assert await offer(connection, member(epoch="newer"), 101.0)
    await connection.close()


async def test_a_removed_member_cannot_come_back_but_its_successor_can(site: Any, member: Make) -> None:
    connection = await dial(site)
    born = now()
    await offer(connection, member(epoch="e1"), born)
    born_before_the_removal = now()
    site.registry.remove(member(epoch="e0").key)
    assert len(site.registry.members()) == 1, "one of before is no reason"
    site.registry.remove(member(epoch="e1").key)
    site.registry.remove(member("relay", 7).key)
    assert site.registry.members() == ()
    assert not await offer(connection, member(epoch="e1"), born)
    assert await offer(connection, member(epoch="e2"), born_before_the_removal)
    await connection.close()


async def test_a_renewal_that_says_nothing_new_is_no_change(site: Any, member: Make) -> None:
    connection = await dial(site)
    await offer(connection, member(), 1.0)
    version = site.registry.version
    await offer(connection, member(), 1.0)
    assert site.registry.version == version
    await offer(connection, member(state="draining"), 1.0)
    assert await site.registry.changed(version) == version + 1
    await connection.close()


async def test_a_registry_that_was_stalled_blames_no_member(site: Any, member: Make) -> None:
    connection = await dial(site)
    for index in range(3):
        await offer(connection, member(index=index), 1.0)
    time.sleep(2 * site.registry.ttl)  # noqa: ASYNC251 - the stall
    await asyncio.sleep(site.registry.ttl / 4)
    assert len(site.registry.members()) == 3
    await site.shows()
    await connection.close()


async def test_a_change_between_two_waits_is_not_missed(site: Any, member: Make) -> None:
    connection = await dial(site)
    version = site.registry.version
    await offer(connection, member(), 1.0)
    assert await asyncio.wait_for(site.registry.changed(version), PATIENCE) > version
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(site.registry.changed(site.registry.version), 0.05)
    await connection.close()
