"""For every suite of this repository, the plugins' own as well."""

from __future__ import annotations

from hypothesis import settings

# An example takes as long as the machine is busy; what ends a test is its timeout.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
