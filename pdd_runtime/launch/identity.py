"""Whether a process id still means the process it meant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def birth(pid: int) -> str:
    """When the process began, as the kernel says it; empty: there is none, or it is dead and not yet collected.

    A pid comes back for another process one day; a pid with the same birth does not.
    """
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return ""
        # After the command in brackets, which may hold anything: state, then fields 4 to 52 of proc(5).
        state, *fields = stat.rpartition(")")[2].split()
        # Dead is a process whose last thread is: the first one's end alone closes no socket.
        return "" if state in "ZX" and int(fields[16]) <= 1 else fields[18]
    shown = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    state, _, began = shown.stdout.strip().partition(" ")
    return "" if state.startswith("Z") else began.strip()


def alive(pid: int, born: str) -> bool:
    """Whether that very process still runs."""
    return bool(born) and birth(pid) == born


def send(pid: int, born: str, number: signal.Signals) -> bool:
    """Signal that very process; False: it is gone."""
    if not alive(pid, born):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
