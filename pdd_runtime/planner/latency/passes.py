"""How long passes take by a roofline: their arithmetic, or their reading of memory, and what chips exchange besides."""

from __future__ import annotations

import math

from pdd_runtime.planner.model_spec import ModelFigures


class Passes:
    """Asked millions of times: all that does not depend on the question is worked out before, as seconds."""

    __slots__ = ("_attends", "_exchange", "_fixed", "_kv_constant", "_kv_token", "_new", "_step")

    def __init__(
        self,
        model: ModelFigures,
        kv: tuple[float, float],
        prefill: tuple[float, float],
        decode: tuple[float, float],
        exchange: float,
        fixed: float,
    ) -> None:
        """`kv`: bytes of a request, and of each of its tokens. `prefill`, `decode`: operations and bytes a second that
        are reached. `exchange`: seconds a token that chips say to each other; `fixed`: of every pass."""
        self._kv_constant, self._kv_token = kv
        self._exchange, self._fixed = exchange, fixed
        self._attends = math.inf if model.attends is None else float(model.attends)
        self._new = _Costs(model, prefill[0], prefill[1], False)
        self._step = _Costs(model, decode[0], decode[1], True)

    def prefill(self, new: int, context: int) -> float:
        costs, most = self._new, self._attends
        pairs = attended = new * (context + (new + 1) / 2)
        if context + new > most:
            below = max(0.0, most - context)
            attended = below * (context + (below + 1) / 2) + (new - below) * most
        computing = costs.token * new + costs.attention * attended + costs.index * pairs
        reading = costs.dense + costs.routed * (1 - costs.idle**new)
        reading += (self._kv_constant + self._kv_token * context) * costs.byte
        return max(computing, reading) + new * self._exchange + self._fixed

    def decode(self, batch: int, context: float) -> float:
        costs = self._step
        attended = min(context, self._attends)
        computing = batch * (costs.token + costs.attention * attended + costs.index * context)
        reading = costs.dense + costs.routed * (1 - costs.idle**batch)
        reading += batch * (self._kv_constant + self._kv_token * context) * costs.byte
        return max(computing, reading) + batch * self._exchange + self._fixed


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
