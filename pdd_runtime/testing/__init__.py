"""What plugin authors use: a conformance suite per contract, and a scripted engine that needs no model.

Only the suites, and what runs them, import pytest: `pip install pdd-runtime[testing]` brings what they need.
"""

from __future__ import annotations

import sys

REWRITTEN = tuple(
    f"{__name__}.{module}"
    for module in (
        "discovery_suite",
        "engine_fault_suite",
        "engine_harness",
        "engine_kv_suite",
        "engine_sampling_suite",
        "engine_suite",
        "handoff_simulation",
        "handoff_suite",
        "kv_parties",
        "latency_suite",
        "native_suite",
        "routing_suite",
        "transport_fault_suite",
        "transport_fixtures",
        "transport_suite",
    )
)
"""Modules whose failed assertions are to show their values, as those in an author's own tests do."""

if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(*REWRITTEN)
