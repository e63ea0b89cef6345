"""The report's figures, and its three deployments."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pdd_runtime.graph import Graph, load
from pdd_runtime.planner.prices import Prices

HERE = Path(__file__).parent
DEPLOYMENTS = ("cdc-pd", "idc-pd", "pdd")


@cache
def published() -> dict[str, Any]:
    """As they stand in published.yaml."""
    return _yaml("published.yaml")


@cache
def deployment(name: str) -> Graph:
    return load(HERE / "graphs" / f"{name}.yaml").graph


def prices() -> Prices:
    return Prices.model_validate(_yaml("prices.yaml"))


def _yaml(name: str) -> Any:
    return yaml.safe_load((HERE / name).read_text())
