"""Settings of the latency model `roofline`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from pdd_runtime.graph.units import Duration
from pdd_runtime.planner.hardware import Hardware
from pdd_runtime.planner.model_spec import ModelFigures

_Share = Annotated[float, Field(gt=0, le=1)]


class RooflineConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    hardware: str
    """What a worker has, e.g. `h100`, `8xh100`, `4x8xh100`."""
    model: str
    """The model, e.g. `deepseek-v3`."""
    chip: Hardware | None = None
    """The chip's own figures, where `hardware` names one that is not known."""
    figures: ModelFigures | None = None
    """The model's own figures, where `model` names one that is not known."""
    kv_bits: int | None = Field(default=None, ge=4, le=32)
    """Of a number in KV; none: as the model has it."""
    compute: _Share | None = None
    """Share of the chips' computing rate that kernels reach; none: 0.7, or 0.15 where experts are spread over chips."""
    bandwidth: _Share | None = None
    """Share of the memory's bandwidth that they reach; none: 0.9, or 0.45 where experts are spread over chips."""
    network: _Share = 0.5
    """Share of what joins the chips that they reach."""
    memory: _Share = 0.9
    """Share of the chips' memory for weights and KV; the rest is for what a pass needs."""
    layer: Duration | None = None
    """What a layer takes however little there is to compute: launches, synchronisation; none: `55us`, or `100us` where
    experts are spread over chips."""
