"""What is wrong with a workload."""

from __future__ import annotations

from pdd_runtime.errors import PddError


class WorkloadError(PddError):
    """A workload is wrong. `where` is file:line:column, a trace's file:line, or the key."""

    code = "workload"
