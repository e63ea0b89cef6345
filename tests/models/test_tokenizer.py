from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pdd_runtime.errors import EngineError
from pdd_runtime.models.gguf_file import GgufFile
from pdd_runtime.models.source import find_model
from pdd_runtime.models.tokenizer import from_directory, from_gguf
from pdd_runtime.testing.byte_tokenizer import byte_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    files: dict[str, Any] = {
        "tokenizer_config.json": {
            "bos_token": "<|start|>",
            "eos_token": {"content": "<|end|>", "special": True},
            "chat_template": [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}],
        },
        "config.json": {"eos_token_id": 257},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().tokenizer_json)
    return tmp_path


def test_a_directory_gives_its_tokenizer_and_template(model: Path) -> None:
    files = from_directory(model)
    assert files.eos_token_ids == (257,)
    assert files.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    assert files.chat_template == "yes"
    (model / "chat_template.jinja").write_text("from a file")
    (model / "generation_config.json").write_text('{"eos_token_id": [257, 3]}')
    files = from_directory(model)
    assert (files.chat_template, files.eos_token_ids) == ("from a file", (257, 3))
    (model / "tokenizer.json").unlink()
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        from_directory(model)


def test_a_gguf_tokenizer_of_another_kind_is_named() -> None:
    with pytest.raises(EngineError, match=r"tokenizer\.ggml\.model: llama is not supported"):
        from_gguf({"tokenizer.ggml.model": "llama"}, "a file")
    with pytest.raises(EngineError, match=r"tokenizer\.ggml\.pre: None is not supported"):
        from_gguf({"tokenizer.ggml.model": "gpt2"}, "a file")


@pytest.mark.model
def test_smollm2_has_its_tokenizer() -> None:
    files = from_gguf(GgufFile(find_model("smollm2").path).metadata, "smollm2")
    assert files.eos_token_ids == (2,)
    assert files.special_tokens["eos_token"] == "<|im_end|>"
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    ids = [1, 4093, 198, 26843, 216, 34, 32, 34, 36, 17, 2]
    assert tokenizer.encode("<|im_start|>user\nHi 2024!<|im_end|>").ids == ids
    for text in ("Grüße, 世界 🌍\n\tdef f(x):  return x", "  spaces   and 1234567 digits"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
