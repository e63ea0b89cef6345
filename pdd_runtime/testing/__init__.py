"""What plugin authors use: a conformance suite per contract, and a scripted engine that needs no model.

Only the suites, and what runs them, import pytest: `pip install pdd-runtime[testing]` brings what they need.
"""

from __future__ import annotations

import sys

if "pytest" in sys.modules:
    # So that a suite's failed assertion shows its values, as one in the author's own tests does.
    sys.modules["pytest"].register_assert_rewrite(
        *(
            f"{__name__}.{module}"
            for module in (
                "conformance",
                "discovery_suite",
                "engine_harness",
                "engine_suite",
                "handoff_simulation",
                "handoff_suite",
                "kv_parties",
                "routing_suite",
                "transport_suite",
            )
        )
    )
