"""How one worker of a pool behaves: all that a simulation needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass

from pdd_runtime.plugins.latency import LatencyModel


@dataclass(frozen=True, slots=True)
class PoolModel:
    """Of each worker of a pool."""

    latency: LatencyModel
    batch_limit: int
    """Requests it decodes at once."""
    chunk: int
    """Prompt tokens of one pass."""
    capacity: int
    """Tokens of KV it holds."""
    block: int
    """Tokens of a block."""
    kv_constant: float
    """Bytes of a request's KV: this, and `kv_token` for each of its tokens."""
    kv_token: float
    overhead: float = 0.0
    """Seconds added to each request's first token there: message plane, scheduling."""

    def kv_bytes(self, tokens: int) -> float:
        """Bytes of the KV of `tokens` tokens of one request."""
        return self.kv_constant + self.kv_token * tokens
