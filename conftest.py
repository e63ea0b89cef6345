"""For every suite of this repository, the plugins' own as well."""

from __future__ import annotations

from hypothesis import settings

# An example takes as long as the machine is busy; what ends a test is its timeout. The same examples in every run, so
# that a change is judged by what it changed; `pytest --hypothesis-profile explore` looks for new ones.
settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("fixed")
