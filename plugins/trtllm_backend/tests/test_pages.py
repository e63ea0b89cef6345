"""How TensorRT-LLM's pages lie, which caches are refused, and how its loader finds the connector."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pdd_connector.trtllm import connector
from pdd_connector.trtllm.pages import Pages, Unsupported, check_attention

LAYERS, HEADS, TOKENS, DIM = 3, 2, 4, 8


def cache(pages: int = 6, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(pages, LAYERS, 2, HEADS * TOKENS * DIM).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_page_has_heads_before_tokens_and_a_block_tokens_before_heads(dtype: torch.dtype) -> None:
    memory = cache(dtype=dtype)
    pages = Pages(memory, HEADS, DIM, TOKENS)
    [block] = pages.read([4], pages.ready())
    assert block.shape == (LAYERS, 2, TOKENS, HEADS, DIM)
    bits = memory.view(torch.int32 if dtype == torch.float32 else torch.int16)
    for layer, part, token, head in ((0, 0, 0, 0), (2, 1, 3, 1), (1, 0, 2, 1)):
        start = (head * TOKENS + token) * DIM
        expected = bits[4, layer, part, start : start + DIM].numpy()
        assert np.array_equal(block[layer, part, token, head].view(expected.dtype), expected)


def test_what_is_written_is_read_again_and_nothing_else_is_touched() -> None:
    memory = cache()
    before = memory.clone()
    pages = Pages(memory, HEADS, DIM, TOKENS)
    shape = (2, LAYERS, 2, TOKENS, HEADS, DIM)
    blocks = np.random.default_rng(1).integers(1, 2**31, shape, dtype=np.uint32)
    pages.write([5, 1], list(blocks), TOKENS + 3, None)
    read = pages.read([5, 1], None)
    assert np.array_equal(read[0], blocks[0])
    assert np.array_equal(read[1][:, :, :3], blocks[1][:, :, :3])
    assert not read[1][:, :, 3:].any(), "bytes of something else stand behind the tail"
    others = [0, 2, 3, 4]
    assert torch.equal(memory[others], before[others])


def test_more_pages_than_are_copied_at_once() -> None:
    memory = cache(pages=40)
    pages = Pages(memory, HEADS, DIM, TOKENS)
    pages.group = 7
    blocks = [pages.read([page], None)[0].copy() for page in range(20)]
    pages.write(list(range(20, 40)), blocks, 20 * TOKENS, None)
    assert torch.equal(memory[:20], memory[20:])


@pytest.mark.parametrize(
    ("memory", "word"),
    [
        (torch.zeros(4, LAYERS, 2, HEADS * TOKENS * DIM, dtype=torch.uint8), "dtype"),
        (torch.zeros(4, LAYERS, 1, HEADS * TOKENS * DIM), "MLA"),
        (torch.zeros(4, LAYERS, 2, HEADS * TOKENS * DIM + 8), "heads"),
        (torch.zeros(4, LAYERS, 2, 2 * HEADS * TOKENS * DIM)[..., ::2], "MLA"),
    ],
)
def test_a_cache_of_another_form_is_refused(memory: torch.Tensor, word: str) -> None:
    with pytest.raises(Unsupported, match=word):
        Pages(memory, HEADS, DIM, TOKENS)


def test_an_attention_backend_whose_pages_are_not_known_is_refused() -> None:
    check_attention("TRTLLM")
    with pytest.raises(Unsupported, match="VANILLA"):
        check_attention("VANILLA")


@pytest.mark.usefixtures("stand_in")
def test_the_loader_finds_two_classes_made_of_the_engines_own() -> None:
    """As the engine does: by the module's path and the classes' names."""
    bases = importlib.import_module("tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector")
    for name in ("Scheduler", "Worker"):
        found: Any = getattr(connector, f"PddConnector{name}")
        assert issubclass(found, getattr(bases, f"KvCacheConnector{name}"))
        assert not found.__abstractmethods__


def test_without_tensorrt_llm_it_says_what_is_needed() -> None:
    with pytest.raises(ImportError, match=r"1\.2 or newer"):
        connector._base("KvCacheConnectorNone")
    with pytest.raises(AttributeError, match="nothing"):
        connector.nothing  # noqa: B018


@pytest.mark.usefixtures("stand_in")
def test_a_connector_without_a_socket_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in connector.SOCKET:
        monkeypatch.delenv(name, raising=False)
    args = SimpleNamespace(
        kv_cache_config=SimpleNamespace(tokens_per_block=TOKENS),
        tensor_parallel_size=1,
        disable_overlap_scheduler=True,
        attn_backend="TRTLLM",
        model=str(tmp_path),
    )
    with pytest.raises(Unsupported, match="PDD_SOCKET"):
        connector.PddConnectorScheduler(args)
    with pytest.raises(Unsupported, match=r"config\.json"):
        connector.PddConnectorWorker(args).register_kv_caches(cache())
