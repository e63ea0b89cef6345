"""Brings the processes of a graph up, keeps them up, and takes them down."""

from __future__ import annotations

from pdd_runtime.launch.child import ChildSpec
from pdd_runtime.launch.client import NotRunningError, change, down, not_running, plan, ps, watch
from pdd_runtime.launch.detached import Detached, start_detached
from pdd_runtime.launch.difference import Change
from pdd_runtime.launch.orders import Apply, Manner, Plan, Restart, Wanted
from pdd_runtime.launch.part import Part
from pdd_runtime.launch.signals import stopped_by_signals
from pdd_runtime.launch.state import AlreadyRunningError, GraphState
from pdd_runtime.launch.status import GraphStatus, ProcessStatus
from pdd_runtime.launch.supervisor import PATIENCE, Supervisor
from pdd_runtime.launch.trust import trusted

__all__ = [
    "PATIENCE",
    "AlreadyRunningError",
    "Apply",
    "Change",
    "ChildSpec",
    "Detached",
    "GraphState",
    "GraphStatus",
    "Manner",
    "NotRunningError",
    "Part",
    "Plan",
    "ProcessStatus",
    "Restart",
    "Supervisor",
    "Wanted",
    "change",
    "down",
    "not_running",
    "plan",
    "ps",
    "start_detached",
    "stopped_by_signals",
    "trusted",
    "watch",
]
