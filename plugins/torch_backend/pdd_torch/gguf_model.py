"""A Llama model in one GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from torch import Tensor

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import TokenizerFiles
from pdd_torch import tokenizer
from pdd_torch.architecture import from_gguf
from pdd_torch.source import Source, hash_files

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
        self.path, self.name, self.files = path, name, [path]
        try:
            reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise EngineError("not a GGUF file", where=str(path), why=str(error)) from error
        self._metadata = {field.name: field.contents() for field in reader.fields.values()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = from_gguf(self._metadata, "output.weight" not in self._tensors, str(path))

    def digest(self) -> str:
        return hash_files(self.files)

    def tensor(self, name: str) -> Tensor:
        stored = self._tensors.get(_gguf_name(name))
        if stored is None:
            raise EngineError(f"the file has no tensor {_gguf_name(name)}", where=str(self.path))
        tensor = torch.tensor(gguf.quants.dequantize(stored.data, stored.tensor_type))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # GGUF has the two elements that RoPE turns together side by side; here they are half a head apart.
            pairs = tensor.view(-1, self.architecture.head_dim // 2, 2, tensor.shape[1])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor

    def tokenizer(self) -> TokenizerFiles:
        return tokenizer.from_gguf(self._metadata, str(self.path))


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.weight"
    layer, part = stem.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{_NAMES[part]}.weight"
