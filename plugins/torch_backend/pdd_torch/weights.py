"""The weights in the form in which the forward pass reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdd_runtime.errors import EngineError
from pdd_torch.source import Source

FORM = "2"
"""Changes whenever `prepare` does: cached files of another form are not read."""


@dataclass(frozen=True)
class LayerWeights:
    """Matrices are `[in, out]`."""

    attention_norm: Tensor
    qkv: Tensor
    """[hidden, (heads + 2 * kv_heads) * head_dim]"""
    output: Tensor
    ffn_norm: Tensor
    gate_up: Tensor
    """[hidden, 2 * ffn]"""
    down: Tensor


@dataclass(frozen=True)
class Weights:
    embedding: Tensor
    """[vocab, hidden]"""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    """[hidden, vocab]"""


def prepare(source: Source, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of a model by the names `assemble` knows. Raises `EngineError` for one of the wrong shape."""
    arch = source.architecture
    q_rows, kv_rows = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim

    def read(name: str, *shape: int) -> Tensor:
        tensor = source.tensor(f"{name}.weight")
        if tuple(tensor.shape) != shape:
            raise EngineError(
                f"{name} has shape {tuple(tensor.shape)}, not {shape} as its config says", where=source.name
            )
        return tensor.to(dtype)

    def fuse(*parts: Tensor) -> Tensor:
        # `[in, out]` either way; which of the two lies in order in memory is what the matrix-vector product of the
        # dtype reads faster (MKL's and torch's own, measured).
        matrix = torch.cat(parts).t()
        return matrix.contiguous() if dtype == torch.float32 else matrix

    embedding = read("model.embed_tokens", arch.vocab, arch.hidden)
    tensors = {
        "embedding": embedding,
        "norm": read("model.norm", arch.hidden),
        "head": fuse(embedding if arch.tied else read("lm_head", arch.vocab, arch.hidden)),
    }
    for i in range(arch.layers):
        layer = f"model.layers.{i}"
        tensors |= {
            f"{i}.attention_norm": read(f"{layer}.input_layernorm", arch.hidden),
            f"{i}.qkv": fuse(
                read(f"{layer}.self_attn.q_proj", q_rows, arch.hidden),
                read(f"{layer}.self_attn.k_proj", kv_rows, arch.hidden),
                read(f"{layer}.self_attn.v_proj", kv_rows, arch.hidden),
            ),
            f"{i}.output": fuse(read(f"{layer}.self_attn.o_proj", arch.hidden, q_rows)),
            f"{i}.ffn_norm": read(f"{layer}.post_attention_layernorm", arch.hidden),
            f"{i}.gate_up": fuse(
                read(f"{layer}.mlp.gate_proj", arch.ffn, arch.hidden),
                read(f"{layer}.mlp.up_proj", arch.ffn, arch.hidden),
            ),
            f"{i}.down": fuse(read(f"{layer}.mlp.down_proj", arch.hidden, arch.ffn)),
        }
    return tensors


def assemble(tensors: dict[str, Tensor], layers: int) -> Weights:
    names = LayerWeights.__dataclass_fields__
    return Weights(
        embedding=tensors["embedding"],
        layers=tuple(LayerWeights(**{name: tensors[f"{i}.{name}"] for name in names}) for i in range(layers)),
        norm=tensors["norm"],
        head=tensors["head"],
    )
