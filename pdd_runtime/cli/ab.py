"""`pdd-runtime ab`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pdd_runtime.cli.console import Consoles
from pdd_runtime.errors import PddError


@dataclass(frozen=True)
class AbOptions:
    """What `ab` was asked for."""

    graphs: Sequence[str]
    """Files and URLs."""
    workload: str
    requests: int
    seed: int
    together: bool
    rounds: int
    block: int | None
    decide: str
    effect: float
    error: float
    early: bool
    slo: str | None
    overrides: Sequence[str]
    driver: Literal["own", "aiperf"]
    wait_timeout: float | None
    form: Literal["table", "json", "html"]
    out: Path | None


def run_ab(options: AbOptions, consoles: Consoles) -> int:
    raise PddError("this command is not there yet", fix="pdd-runtime bench compares graphs")
