"""How long a test may take."""

from __future__ import annotations

import pytest

from tests.conftest import STARTING

Asked = pytest.FixtureRequest


def bound(request: Asked) -> float | None:
    """Of the test that asks, in seconds; None: that of all."""
    marker = request.node.get_closest_marker("timeout")
    return None if marker is None else marker.args[0]


@pytest.fixture
def fleet() -> None:
    """In place of one that starts processes."""


@pytest.mark.usefixtures("fleet")
def test_what_starts_processes_has_as_long_as_they_need(request: Asked) -> None:
    assert bound(request) == STARTING


@pytest.mark.usefixtures("fleet")
@pytest.mark.timeout(33)
def test_what_says_it_itself_has_what_it_says(request: Asked) -> None:
    assert bound(request) == 33


def test_what_starts_none_has_what_all_have(request: Asked) -> None:
    assert bound(request) is None
