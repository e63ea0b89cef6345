"""Recorded requests: what they asked for, when, and what they had in common."""

from __future__ import annotations

from pdd_runtime.planner.traces.replay import replay
from pdd_runtime.planner.traces.trace import Trace

__all__ = ["Trace", "replay"]
