"""Latency as it was measured: a table, and what lies between its points."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pdd_runtime.planner.latency.surface import Surface
from pdd_runtime.plugins.latency import LatencyModel

_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Grid(BaseModel):
    """Seconds by two numbers. A cell that was not measured is null; the first row and the first column are whole."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    tokens: list[Annotated[int, Field(ge=1)]] = Field(min_length=1, max_length=256)
    """Rows: new tokens of a pass, or sequences of a step; ascending."""
    context: list[Annotated[int, Field(ge=0)]] = Field(min_length=1, max_length=256)
    """Columns: known tokens before them, for each sequence; ascending."""
    seconds: list[list[_Seconds | None]]

    @model_validator(mode="after")
    def _whole(self) -> Grid:
        for name, axis in (("tokens", self.tokens), ("context", self.context)):
            if any(high <= low for low, high in pairwise(axis)):
                raise ValueError(f"{name} must ascend")
        if len(self.seconds) != len(self.tokens) or any(len(row) != len(self.context) for row in self.seconds):
            raise ValueError(f"seconds must have {len(self.tokens)} rows of {len(self.context)} cells")
        if None in self.seconds[0] or any(row[0] is None for row in self.seconds):
            raise ValueError("the first row and the first column of seconds must be whole")
        return self


class TableConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    prefill: Grid
    """Of passes over new tokens of one sequence."""
    decode: Grid
    """Of steps of several sequences."""
    origin: str = "a table without an origin"
    """Where the figures are from, for reports."""


class Table(LatencyModel):
    """Linear between points and beyond the last one. Noise by which more would take less is smoothed away."""

    name = "table"
    Config = TableConfig
    config: TableConfig

    def __init__(self, config: TableConfig) -> None:
        super().__init__(config)
        self._prefill, self._decode = Surface(config.prefill), Surface(config.decode)

    @property
    def source(self) -> str:
        new, behind = self.config.prefill.tokens[-1], self.config.prefill.context[-1]
        batch, context = self.config.decode.tokens[-1], self.config.decode.context[-1]
        passes = f"{self.config.origin}; measured up to {new} new tokens behind {behind}"
        return f"{passes}, and a batch of {batch} at {context}" if batch > 1 else passes

    def prefill(self, new: int, context: int) -> float:
        return self._prefill(new, context)

    def decode(self, batch: int, context: float) -> float:
        return self._decode(batch, context)
