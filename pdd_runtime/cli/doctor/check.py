"""What one look at the machine, the graph or what runs has found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """One finding. `warn`: it works, worse than it could. `fail`: it does not work."""

    group: str
    name: str
    status: Status
    found: str
    fix: str = ""


def first_line(path: str) -> str:
    """Of a file of the kernel; empty where there is none: not Linux, or not this kernel."""
    try:
        return Path(path).read_text().split("\n", 1)[0].strip()
    except OSError:
        return ""
