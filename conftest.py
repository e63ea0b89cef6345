"""For every suite of this repository, the plugins' own as well."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings

# An example takes as long as the machine is busy; what ends a test is its timeout. The same examples in every run, so
# that a change is judged by what it changed; `pytest --hypothesis-profile explore` looks for new ones.
settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("fixed")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Processes that share the files end together when the long ones are not the last: files with slow tests come
    first, and of the others those with many tests."""
    if hasattr(config, "workerinput"):
        tests = Counter(item.path for item in items)
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: (item.path not in slow, -tests[item.path]))
