"""Latency from first principles: a pass takes as long as its arithmetic, or as its reading of memory, whichever is
longer, and what its chips say to each other besides."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from pdd_runtime.graph.units import write_duration
from pdd_runtime.planner.figures import FigureError
from pdd_runtime.planner.hardware import counted, machine
from pdd_runtime.planner.latency.roofline_config import RooflineConfig
from pdd_runtime.planner.model_spec import ModelFigures, model_figures
from pdd_runtime.plugins.latency import LatencyModel

_ACTIVATION: Final = 2.0
"""Bytes of a number that chips exchange."""


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
        self._fixed = model.layers * self.reached.layer
        self._exchange = self._exchange_time()
        # Asked millions of times: all that does not depend on the question is worked out here, as seconds.
        chip, chips = self.machine.chip, self.machine.chips
        rate = chips * self.reached.compute * ((chip.compute_fp8 if model.compute == "fp8" else None) or chip.compute)
        bandwidth = chips * self.reached.bandwidth * chip.bandwidth
        self._attends = math.inf if model.attends is None else float(model.attends)
        self._new = _Costs(model, rate * chip.prefill, bandwidth * chip.prefill, False)
        self._step = _Costs(model, rate * chip.decode, bandwidth * chip.decode, True)

    @property
    def source(self) -> str:
        config, reached = self.config, self.reached
        return (
            f"roofline of {config.model} on {config.hardware}: {reached.compute:.0%} of its compute, "
            f"{reached.bandwidth:.0%} of its memory bandwidth, {config.network:.0%} of its interconnect, "
            f"{write_duration(reached.layer)} a layer"
        )

    def prefill(self, new: int, context: int) -> float:
        costs, most = self._new, self._attends
        pairs = attended = new * (context + (new + 1) / 2)
        if context + new > most:
            below = max(0.0, most - context)
            attended = below * (context + (below + 1) / 2) + (new - below) * most
        computing = costs.token * new + costs.attention * attended + costs.index * pairs
        reading = costs.dense + costs.routed * (1 - costs.idle**new)
        reading += (self.kv_constant + self.kv_token * context) * costs.byte
        return max(computing, reading) + new * self._exchange + self._fixed

    def decode(self, batch: int, context: float) -> float:
        costs = self._step
        attended = min(context, self._attends)
        computing = batch * (costs.token + costs.attention * attended + costs.index * context)
        reading = costs.dense + costs.routed * (1 - costs.idle**batch)
        reading += batch * (self.kv_constant + self.kv_token * context) * costs.byte
        return max(computing, reading) + batch * self._exchange + self._fixed

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


class _Costs:
    """Of one phase, in seconds."""

    __slots__ = ("attention", "byte", "dense", "idle", "index", "routed", "token")

    def __init__(self, model: ModelFigures, flops: float, bandwidth: float, decoding: bool) -> None:
        other = model.attention_decode if decoding else None
        self.token = 2 * model.each_token / flops
        """Of a token, what it attends to aside."""
        self.attention = (model.attention if other is None else other) / flops
        """Of a pair of tokens."""
        self.index = model.index / flops
        self.byte = 1 / bandwidth
        self.dense, self.routed = (
            model.dense * model.weight_bytes / bandwidth,
            model.routed * model.weight_bytes / bandwidth,
        )
        """Of reading the weights that every token needs, and those of all experts."""
        self.idle = 1 - model.experts_active / model.experts
        """Share of the experts that a token leaves alone."""
