"""The numbers of parameters.yaml, and what is made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import yaml
from published import HERE

from pdd_runtime.planner import Workload, read_workload
from pdd_runtime.planner.simulate.link import LinkModel


@dataclass(frozen=True)
class Line:
    """The line of the transfer test."""

    connections: int
    flow_rate: float
    """Bytes/s of one connection."""
    fresh: float
    """Uncached tokens of the skewed test, against the workload's."""
    transfers: int
    """Of a run."""

    def model(self) -> LinkModel:
        everything = parameters()
        line, rtt = everything["given"]["line"], everything["assumed"]["rtt"]
        return LinkModel(line, rtt, self.flow_rate, connections=self.connections, discipline="fair")


@cache
def parameters() -> dict[str, Any]:
    return dict(yaml.safe_load((HERE / "parameters.yaml").read_text()))


def fitted_line(**changes: float) -> Line:
    return replace(Line(**parameters()["fitted"]["line"]), **changes)  # type: ignore[arg-type]


@cache
def skewed() -> Workload:
    """As the report has it."""
    return read_workload("report")


@cache
def narrow() -> Workload:
    """As many tokens to compute on average, nearly alike."""
    return read_workload("report-narrow")
