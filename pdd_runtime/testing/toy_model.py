"""A model without weights: its KV and its next tokens are hashes of the tokens before."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from pdd_runtime.kv import KvLayout
from pdd_runtime.plugins.engine import Sampling, Token

States = NDArray[np.uint64]
HALF = math.log(0.5)
"""Each token's log probability over that of the next likelier one."""


class ToyModel:
    """Deterministic, and as strict as a real model: the *state* at a position depends on every token up to it, the
    KV row of a position is drawn from its state, and the next token from the last state.

    After a state, the k-th likeliest token has probability 2^-(k+1): so filters, seeds and logprobs mean what they
    mean for a real model, at the cost of a few hashes a token.
    """

    def __init__(
        self, source: str, layout: KvLayout, vocabulary: Sequence[int], eos: int, eos_every: int | None
    ) -> None:
        """`vocabulary`: the ids it may choose. With `eos_every` = N the token at every position that N divides
        is `eos`."""
        self.layout, self.vocabulary, self.eos, self.eos_every = layout, vocabulary, eos, eos_every
        self.start = xxhash.xxh3_64_intdigest(source.encode())
        self._row = (layout.layers, 2, layout.tp_size, layout.kv_heads // layout.tp_size, layout.head_dim)
        words = -(-math.prod(self._row) // 4)
        pattern = np.random.default_rng(self.start).integers(0, 2**63, words, dtype=np.uint64)
        self._pattern = pattern * np.uint64(2) + np.uint64(1)

    def states(self, last: int, tokens: Sequence[int]) -> list[int]:
        """The state after each of `tokens`, where `last` is the state before them."""
        states = []
        for token in tokens:
            last = xxhash.xxh3_64_intdigest(last.to_bytes(8, "little") + token.to_bytes(4, "little"))
            states.append(last)
        return states

    def rows(self, states: Sequence[int]) -> NDArray[Any]:
        """The K and V of positions with these states, in the order of `KvLayout.elements`, but `len(states)` tokens.

        The numbers are exact in every dtype: a bfloat16's sign and fraction, and four bits of exponent around 1.
        """
        products = np.array(states, dtype=np.uint64)[:, None] * self._pattern[None, :]
        words = products.view("<u2")[:, : math.prod(self._row)]
        bits: NDArray[Any] = (words & 0x807F) | (((words >> 7 & 15) + 120) << 7)
        if self.layout.dtype != "bfloat16":
            bits = bits.astype(np.uint32) << 16
        if self.layout.dtype == "float16":
            bits = bits.view(np.float32).astype(np.float16).view(np.uint16)
        return bits.reshape(-1, *self._row).transpose(1, 2, 0, 3, 4, 5)

    def next(self, state: int, position: int, sampling: Sampling) -> Token:
        """The token at `position`, after `state`."""
        if self.ends(position):
            wanted = sampling.logprobs
            return Token(position, self.eos, None if wanted is None else 0.0, ((self.eos, 0.0),) if wanted else ())
        ranks = len(self.vocabulary)
        rank = self._rank(sampling, position, ranks)
        chosen = self.vocabulary[(state + rank) % ranks]
        if sampling.logprobs is None:
            return Token(position, chosen)
        return Token(position, chosen, *self.logprobs(rank, self.ranked(state, sampling.logprobs), sampling))

    def ends(self, position: int) -> bool:
        """Whether the token there is the end token."""
        return self.eos_every is not None and position % self.eos_every == 0

    def ranked(self, state: int, count: int | None = None) -> list[int]:
        """The `count` likeliest tokens after `state`, or all, best first; the end token is none of them."""
        ranks = len(self.vocabulary)
        return [self.vocabulary[(state + k) % ranks] for k in range(ranks if count is None else min(ranks, count))]

    @staticmethod
    def logprobs(
        rank: int, ranked: Sequence[int], sampling: Sampling
    ) -> tuple[float | None, tuple[tuple[int, float], ...]]:
        """What a `Token` says of its probability, where it is the one of this rank and `ranked` the likeliest."""
        if sampling.logprobs is None:
            return None, ()
        return (rank + 1) * HALF, tuple((token, (k + 1) * HALF) for k, token in enumerate(ranked[: sampling.logprobs]))

    def _rank(self, sampling: Sampling, position: int, ranks: int) -> int:
        """Draw a rank from the geometric distribution at this temperature, cut as the filters say."""
        if sampling.temperature <= 0:
            return 0
        log_ratio = HALF / sampling.temperature
        ratio = math.exp(log_ratio)
        if sampling.top_k:
            ranks = min(ranks, sampling.top_k)
        if sampling.min_p > 0:
            ranks = min(ranks, 1 + int(math.log(sampling.min_p) / log_ratio))
        if sampling.top_p < 1:
            ranks = min(ranks, max(1, math.ceil(math.log(1 - sampling.top_p) / log_ratio)))
        seed = array("Q", (sampling.seed & (2**64 - 1), position)).tobytes()
        uniform = (xxhash.xxh3_64_intdigest(seed) >> 11) * 2.0**-53
        # The inverse of the truncated geometric distribution's cumulative sum.
        rank = math.log1p(-uniform * (1 - ratio**ranks)) / log_ratio
        return min(int(rank), ranks - 1)
