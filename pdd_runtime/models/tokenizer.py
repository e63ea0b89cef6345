"""What a frontend needs to speak the model's language, from a model directory or a GGUF file's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import TokenizerFiles

_CONTROL = 3
"""`token_type` of special tokens in GGUF."""
_SPECIALS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def from_gguf(metadata: Mapping[str, Any], where: str) -> TokenizerFiles:
    """A byte-level BPE tokenizer. Raises `EngineError` for any other kind."""
    for field, supported in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
        if metadata.get(field) != supported:
            raise EngineError(
                f"{field}: {metadata.get(field)} is not supported",
                where=where,
                why=f"tokenizers are built from {field}: {supported} alone",
                fix="use the model's safetensors directory, which has a tokenizer.json",
            )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL
        ]
    )
    eos = {
        metadata[f"tokenizer.ggml.{name}_token_id"]
        for name in ("eos", "eot")
        if f"tokenizer.ggml.{name}_token_id" in metadata
    }
    specials = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in _SPECIALS.items()}
    return TokenizerFiles(
        tokenizer_json=tokenizer.to_str(),
        chat_template=metadata.get("tokenizer.chat_template"),
        eos_token_ids=tuple(sorted(eos)),
        special_tokens={name: tokens[id] for name, id in specials.items() if id is not None},
    )


def from_directory(path: Path) -> TokenizerFiles:
    """From `tokenizer.json`, and what stands beside it. Raises `EngineError` where that is missing."""
    try:
        tokenizer_json = (path / "tokenizer.json").read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise EngineError(
            "the model has no tokenizer.json", where=str(path), fix="save it with its fast tokenizer"
        ) from error
    settings = _read_json(path / "tokenizer_config.json")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next((item["template"] for item in template if item["name"] == "default"), None)
    if (path / "chat_template.jinja").exists():
        template = (path / "chat_template.jinja").read_text(encoding="utf-8")
    specials = {name: settings[name] for name in _SPECIALS.values() if settings.get(name)}
    eos = _read_json(path / "generation_config.json").get(
        "eos_token_id", _read_json(path / "config.json").get("eos_token_id")
    )
    return TokenizerFiles(
        tokenizer_json=tokenizer_json,
        chat_template=template,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        special_tokens={
            name: token["content"] if isinstance(token, dict) else token for name, token in specials.items()
        },
    )


def _read_json(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
