"""The forward pass of a Llama model over one step's chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

from pdd_runtime.inprocess import Chunk
from pdd_torch import attention
from pdd_torch.architecture import Architecture
from pdd_torch.exact_attention import KEYS, ExactAttention
from pdd_torch.linear import Linears
from pdd_torch.paged_kv import PagedKv
from pdd_torch.weights import LayerWeights, Weights

Attend = Callable[[Tensor, int], Tensor]
"""One chunk's queries `[tokens, heads, head_dim]` in one layer to their output `[tokens, heads * head_dim]`."""


class Llama:
    """Reads and writes the blocks of the chunks it is given; call it from one thread only."""

    def __init__(
        self, arch: Architecture, weights: Weights, kv: PagedKv, *, exact: bool, most_rows: int, batch_limit: int
    ) -> None:
        self.arch, self.kv = arch, kv
        self._exact = ExactAttention(arch.heads, arch.kv_heads, arch.head_dim) if exact else None
        self._embedding, self._norm = weights.embedding, weights.norm
        linears = Linears(exact=exact, most_rows=most_rows)
        self._layers = [_Layer(layer, linears) for layer in weights.layers]
        self._head = Linears(exact=exact, most_rows=batch_limit).make(weights.head)
        # In float32, as the reference implementation does it: what models were trained with.
        exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim
        self._frequencies = 1 / arch.rope_theta**exponents

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Makes the KV of all chunks. Returns float32 logits `[chunks that sample, vocab]`, in the chunks' order."""
        arch = self.arch
        ids = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        positions = torch.cat([torch.arange(chunk.start, chunk.end) for chunk in chunks])
        angles = (positions[:, None] * self._frequencies)[:, None]
        cos, sin = torch.cat([angles.cos()] * 2, dim=-1), torch.cat([-angles.sin(), angles.sin()], dim=-1)
        attends = [self._attend(chunk) for chunk in chunks]
        counts = [len(chunk.tokens) for chunk in chunks]
        write_plan = self.kv.write_plan(chunks)

        x = self._embedding[ids]
        attended = x.new_empty(len(ids), arch.heads * arch.head_dim)
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(x, layer.attention_norm)).view(len(ids), -1, arch.head_dim)
            qk = self._rotate(qkv[:, : -arch.kv_heads], cos, sin)
            q, k, v = qk[:, : arch.heads], qk[:, arch.heads :], qkv[:, -arch.kv_heads :]
            self.kv.write(write_plan[i], torch.stack((k, v)))
            parts = zip(torch.split(q, counts), torch.split(attended, counts), attends, strict=True)
            for queries, out, attend in parts:
                out.copy_(attend(queries, i))
            x = x + layer.output(attended)
            gate, up = layer.gate_up(self._normed(x, layer.ffn_norm)).chunk(2, dim=1)
            x = x + layer.down(silu(gate) * up)

        last = torch.tensor(counts).cumsum(0) - 1
        wanted = x[last[[chunk.samples for chunk in chunks]]]
        return self._head(self._normed(wanted, self._norm)).float()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, (self.arch.hidden,), weight, self.arch.norm_eps)

    @staticmethod
    def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        return (x * cos + torch.cat((right, left), dim=-1) * sin).to(x.dtype)

    def _attend(self, chunk: Chunk) -> Attend:
        """All that the chunk's attention needs, worked out once for all layers."""
        end, kv = chunk.end, self.kv
        if exact := self._exact:
            runs, tiles = kv.read_plan(chunk, KEYS), exact.tiles(chunk.start, len(chunk.tokens))

            def exactly(q: Tensor, layer: int) -> Tensor:
                k, v = kv.read(runs[layer])
                k[end:], v[end:] = 0, 0
                return exact.attend(q.float(), k.float(), v.float(), tiles).to(q.dtype)

            return exactly
        runs = kv.read_plan(chunk)
        mask = attention.causal_mask(chunk.start, len(chunk.tokens), self.arch.heads // self.arch.kv_heads, kv.dtype)

        def fast(q: Tensor, layer: int) -> Tensor:
            k, v = kv.read(runs[layer])
            return attention.attend(q, k[:end], v[:end], mask)

        return fast


class _Layer:
    def __init__(self, weights: LayerWeights, linears: Linears) -> None:
        self.attention_norm, self.ffn_norm = weights.attention_norm, weights.ffn_norm
        self.qkv, self.output = linears.make(weights.qkv), linears.make(weights.output)
        self.gate_up, self.down = linears.make(weights.gate_up), linears.make(weights.down)
