"""Brings the processes of a graph up, keeps them up, and takes them down."""

from __future__ import annotations

from pdd_runtime.launch.child import ChildSpec
from pdd_runtime.launch.client import NotRunningError, down, not_running, ps, watch
from pdd_runtime.launch.detached import Detached, start_detached
from pdd_runtime.launch.part import Part
from pdd_runtime.launch.signals import stopped_by_signals
from pdd_runtime.launch.state import AlreadyRunningError, GraphState
from pdd_runtime.launch.status import GraphStatus, ProcessStatus
from pdd_runtime.launch.supervisor import PATIENCE, Supervisor

__all__ = [
    "PATIENCE",
    "AlreadyRunningError",
    "ChildSpec",
    "Detached",
    "GraphState",
    "GraphStatus",
    "NotRunningError",
    "Part",
    "ProcessStatus",
    "Supervisor",
    "down",
    "not_running",
    "ps",
    "start_detached",
    "stopped_by_signals",
    "watch",
]
