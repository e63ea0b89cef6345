"""A Llama model in one GGUF file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pdd_runtime.errors import EngineError
from pdd_runtime.models import tokenizer
from pdd_runtime.models.gguf_file import GgufFile
from pdd_runtime.models.source import hash_files
from pdd_runtime.plugins.engine import TokenizerFiles
from pdd_torch.architecture import from_gguf
from pdd_torch.source import Source

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GgufModel(Source):
    def __init__(self, path: Path, name: str) -> None:
        self.name, self.files = name, [path]
        self._file = GgufFile(path)
        self.architecture = from_gguf(self._file.metadata, "output.weight" not in self._file.tensors, str(path))

    def digest(self) -> str:
        return hash_files(self.files)

    def tensor(self, name: str) -> Tensor:
        import gguf  # takes a while, and a cached model needs none of it

        where, stored = str(self._file.path), _gguf_name(name)
        if stored not in self._file.tensors:
            raise EngineError(f"the file has no tensor {stored}", where=where)
        kind, shape, offset = self._file.tensors[stored]
        try:
            quantization = gguf.GGMLQuantizationType(kind)
            block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
            packed = (*shape[:-1], shape[-1] // block * block_bytes)
            data = np.memmap(self._file.path, np.uint8, "r", offset, packed)
            tensor = torch.tensor(gguf.quants.dequantize(data, quantization))
        except (ValueError, KeyError, NotImplementedError) as error:
            raise EngineError(f"the tensor {stored} cannot be read", where=where, why=str(error)) from error
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # GGUF has the two elements that RoPE turns together side by side; here they are half a head apart.
            pairs = tensor.view(-1, self.architecture.head_dim // 2, 2, tensor.shape[1])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor

    def tokenizer(self) -> TokenizerFiles:
        return tokenizer.from_gguf(self._file.metadata, str(self._file.path))


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.weight"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_NAMES[part]}.weight"
