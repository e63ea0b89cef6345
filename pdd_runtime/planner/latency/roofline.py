"""Latency from first principles: a pass takes as long as its arithmetic, or as its reading of memory, whichever is
longer, and what its chips say to each other besides."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from pdd_runtime.graph.units import Duration, write_duration
from pdd_runtime.planner.figures import FigureError
from pdd_runtime.planner.hardware import Hardware, counted, machine
from pdd_runtime.planner.latency.passes import Passes
from pdd_runtime.planner.model_spec import ModelFigures, model_figures
from pdd_runtime.plugins.latency import LatencyModel

_ACTIVATION = 2
"""Bytes of a number that chips exchange."""
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


class Reached(NamedTuple):
    """What kernels make of the figures."""

    compute: float
    bandwidth: float
    layer: float


WHOLE, SPREAD = Reached(0.7, 0.9, 55e-6), Reached(0.15, 0.45, 100e-6)
"""Where every chip does the same, and where experts are spread over chips, of which some have more to do than others.
Fits to kernels that were measured: `bench/latency.py`, docs/latency.md."""


class Roofline(LatencyModel):
    """All chips of a worker share each pass evenly (tensor or expert parallel)."""

    name = "roofline"
    Config = RooflineConfig
    config: RooflineConfig

    def __init__(self, config: RooflineConfig) -> None:
        """Raises `FigureError` where chip or model is not known, or the weights do not fit."""
        super().__init__(config)
        own = {counted(config.hardware)[1]: config.chip} if config.chip else None
        self.machine = machine(config.hardware, own)
        self.model = model = model_figures(config.model, {config.model: config.figures} if config.figures else None)
        self.kv_constant, self.kv_token = model.kv(config.kv_bits or model.kv_bits)
        self.room = self.machine.memory * config.memory - model.weights
        """Bytes left for KV."""
        if self.room <= 0:
            raise FigureError(
                f"{config.model} does not fit on {config.hardware}",
                why=f"its weights are {model.weights / 1e9:.0f} GB, and theirs is {config.memory:.0%} of "
                f"{self.machine.memory / 1e9:.0f} GB",
                fix="take more chips, or larger ones",
            )
        usual = SPREAD if model.experts > 1 and self.machine.chips > 1 else WHOLE
        said = (config.compute, config.bandwidth, config.layer)
        self.reached = Reached(*(usual[n] if share is None else share for n, share in enumerate(said)))
        chip, chips = self.machine.chip, self.machine.chips
        rate = chips * self.reached.compute * ((chip.compute_fp8 if model.compute == "fp8" else None) or chip.compute)
        bandwidth = chips * self.reached.bandwidth * chip.bandwidth
        self._passes = Passes(
            model,
            (self.kv_constant, self.kv_token),
            (rate * chip.prefill, bandwidth * chip.prefill),
            (rate * chip.decode, bandwidth * chip.decode),
            self._exchange_time(),
            model.layers * self.reached.layer,
        )

    @property
    def source(self) -> str:
        config, reached = self.config, self.reached
        return (
            f"roofline of {config.model} on {config.hardware}: {reached.compute:.0%} of its compute, "
            f"{reached.bandwidth:.0%} of its memory bandwidth, {config.network:.0%} of its interconnect, "
            f"{write_duration(reached.layer)} a layer"
        )

    def prefill(self, new: int, context: int) -> float:
        return self._passes.prefill(new, context)

    def decode(self, batch: int, context: float) -> float:
        return self._passes.decode(batch, context)

    def capacity(self, requests: int) -> int:
        """Tokens of KV that fit beside the weights, when `requests` requests are there. Raises `FigureError`."""
        tokens = int((self.room - requests * self.kv_constant) / self.kv_token)
        if tokens < 1:
            raise FigureError(
                f"no KV of {requests} requests of {self.config.model} fits on {self.config.hardware}",
                why=f"{self.room / 1e9:.1f} GB are left beside the weights",
                fix="take more chips, or larger ones, or fewer requests at once",
            )
        return tokens

    def _exchange_time(self) -> float:
        """Seconds a token. Of a dense model: two all-reduces a layer, in which each chip of n sends 2 (n - 1) / n of
        the activations, first within a node, then, each chip its share, between nodes. Of one with experts: each layer
        sends a token's activations to its experts in 8 bits and back in 16, from all chips at once."""
        chip, chips, model = self.machine.chip, self.machine.chips, self.model
        inside = min(chips, chip.node)
        if model.experts > 1:
            sent = 3 * model.hidden * model.experts_active * (chips - 1) / chips / chips
            stays = (inside - 1) / max(1, chips - 1)
            seconds = sent * (stays / chip.interconnect + (1 - stays) / chip.network)
        else:
            nodes, sent = chips / inside, 4 * _ACTIVATION * model.hidden
            seconds = sent * (inside - 1) / inside / chip.interconnect
            seconds += sent * (nodes - 1) / nodes / (inside * chip.network)
        return model.layers * seconds / self.config.network
