from __future__ import annotations

import pytest

STARTING = 480.0
"""Seconds for a test that starts a graph's processes, or waits for them: they take as long as the machine needs."""
STARTS = frozenset({"cli", "fleet", "make_fleet", "own_fleet", "stack"})
"""Fixtures that start them, or let a test do so."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full-identity",
        action="store_true",
        help="token identity on the real model for every prompt, strategy and handoff point (about an hour)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What has not said itself how long it may take has as long as its processes need."""
    for item in items:
        starts = "integration" in item.path.parts or not STARTS.isdisjoint(getattr(item, "fixturenames", ()))
        if starts and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(STARTING))
