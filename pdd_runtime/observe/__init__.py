"""What can be seen of a running graph: request timelines and metrics."""

from __future__ import annotations

from pdd_runtime.observe.timeline import RecoveryRecord, Timeline, Timelines
from pdd_runtime.observe.vitals import Vitals, serve_vitals, vitals

__all__ = ["RecoveryRecord", "Timeline", "Timelines", "Vitals", "serve_vitals", "vitals"]
