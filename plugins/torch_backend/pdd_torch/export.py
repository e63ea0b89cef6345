"""Any model that this engine reads, as a directory: what server engines want, made of a GGUF file.

python -m pdd_torch.export smollm2 ~/models/smollm2
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from pdd_runtime.errors import EngineError, PddError
from pdd_runtime.plugins.engine import TokenizerFiles
from pdd_torch.architecture import Architecture
from pdd_torch.source import Source, open_source

_NORMS = ("input_layernorm", "post_attention_layernorm")
_MATRICES = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def write_directory(source: str, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write the model `source` to the new directory `path`: config.json, model.safetensors in `dtype`, tokenizer files.
    Returns `path`.

    A quantised model's weights are those that this engine computes with. The directory is another model than its file:
    KV of the two does not mix. Raises `EngineError` for a model that the engine does not read, and where `path` exists.
    """
    model = open_source(source)
    if path.exists():
        raise EngineError("there is something already", where=str(path), fix="name a directory that is not there yet")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whole, or not at all: half a model would look like one.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".pdd-export-") as scratch:
        made = Path(scratch) / path.name
        made.mkdir()
        tensors = {name: model.tensor(name).to(dtype).contiguous() for name in _names(model.architecture)}
        save_file(tensors, made / "model.safetensors", {"format": "pt"})
        _write_words(model, dtype, made)
        # The library makes a file for its owner alone; another user's server may read the rest.
        (made / "model.safetensors").chmod((made / "config.json").stat().st_mode)
        made.rename(path)
    return path


def _names(arch: Architecture) -> list[str]:
    names = ["model.embed_tokens", *(() if arch.tied else ("lm_head",)), "model.norm"]
    names += [f"model.layers.{i}.{part}" for i in range(arch.layers) for part in (*_NORMS, *_MATRICES)]
    return [f"{name}.weight" for name in names]


def _write_words(model: Source, dtype: torch.dtype, path: Path) -> None:
    files = model.tokenizer()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.architecture.context,
        **files.special_tokens,
        **({} if files.chat_template is None else {"chat_template": files.chat_template}),
    }
    _write(path / "config.json", _config(model.architecture, files, dtype))
    _write(path / "tokenizer_config.json", settings)
    (path / "tokenizer.json").write_text(files.tokenizer_json, encoding="utf-8")


def _config(arch: Architecture, files: TokenizerFiles, dtype: torch.dtype) -> dict[str, Any]:
    ends = list(files.eos_token_ids)
    start = files.special_tokens.get("bos_token")
    ids = {
        "bos_token_id": None if start is None else Tokenizer.from_str(files.tokenizer_json).token_to_id(start),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "num_hidden_layers": arch.layers,
        "hidden_size": arch.hidden,
        "intermediate_size": arch.ffn,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.kv_heads,
        "head_dim": arch.head_dim,
        "vocab_size": arch.vocab,
        "max_position_embeddings": arch.context,
        "rope_theta": arch.rope_theta,
        "rms_norm_eps": arch.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": arch.tied,
        **{name: value for name, value in ids.items() if value is not None},
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pdd_torch.export", description="A model as a directory.")
    parser.add_argument("source", help="smollm2, a .gguf file, or a directory")
    parser.add_argument("path", type=Path, help="the directory to make")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    args = parser.parse_args()
    try:
        write_directory(args.source, args.path, getattr(torch, args.dtype))
    except PddError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
