"""The `local` discovery keeps the contract, and the suite finds discoveries that do not."""

from __future__ import annotations

import pytest

from pdd_runtime.discovery import LocalDiscovery
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.plugins.routing import WorkerKey
from pdd_runtime.testing import conformance, discovery_suite
from tests.testing.outcomes import ran


class QuickDiscovery(LocalDiscovery):
    """Of little patience, for short tests."""

    ttl = 1.0


class TestLocal(conformance.TestLocalDiscovery):
    plugin = QuickDiscovery


class Mute(QuickDiscovery):
    """Never says goodbye."""

    async def unregister(self, key: WorkerKey) -> None:
        return None


class Ghost(QuickDiscovery):
    """Does not renew what it has registered."""

    async def register(self, member: Member) -> None:
        await self.renew(member)


BROKEN = """
from pdd_runtime.testing.conformance import TestLocalDiscovery as Suite
from tests.testing.test_discovery_suite import {name}


class TestBroken(Suite):
    plugin = {name}


del Suite
"""


@pytest.mark.parametrize(
    ("cls", "caught"),
    [
        (Mute, "test_unregister_and_close_take_a_member_out_soon"),
        (Ghost, "test_who_is_killed_expires_and_who_lives_is_kept"),
    ],
)
def test_the_suite_finds_what_breaks_the_contract(
    monkeypatch: pytest.MonkeyPatch, cls: type[QuickDiscovery], caught: str
) -> None:
    monkeypatch.setattr(discovery_suite, "PATIENCE", 2.0)
    # It may fail more of them: the patience is short here.
    assert caught in ran(BROKEN.format(name=cls.__name__)).failed
