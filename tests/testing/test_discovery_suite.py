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


class Ghost(QuickDiscovery):
    """Never says goodbye, and does not renew what it has registered."""

    async def register(self, member: Member) -> None:
        await self.renew(member)

    async def unregister(self, key: WorkerKey) -> None:
        return None


GHOST = """
from pdd_runtime.testing.conformance import TestLocalDiscovery as Suite
from tests.testing.test_discovery_suite import Ghost


class TestGhost(Suite):
    plugin = Ghost


del Suite
"""


def test_the_suite_finds_what_breaks_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery_suite, "PATIENCE", 2.0)
    # It may fail more of them: the patience is short here, and a member that is not taken out may just have expired.
    assert ran(GHOST).failed >= {
        "test_unregister_and_close_take_a_member_out_soon",
        "test_who_is_killed_expires_and_who_lives_is_kept",
    }
