from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pdd_torch.testing import build_tiny_model
from safetensors.torch import load_file
from torch import Tensor

SHAPES = [
    {"heads": 4, "kv_heads": 2},
    {"heads": 4, "kv_heads": 4, "tied": False},
    {"heads": 6, "kv_heads": 1, "hidden": 96, "layers": 3},
]


def text(n: int, which: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(which).choices(range(256), k=n))


def reference(path: Path, tokens: tuple[int, ...]) -> Tensor:
    """Logits at every position: the model as its paper writes it, in float64, whole, with nothing cached."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    w = {name: tensor.double() for name, tensor in load_file(path / "model.safetensors").items()}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size, n = config["hidden_size"] // heads, len(tokens)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]

    def turn(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        for i in range(size // 2):
            angle = torch.arange(n, dtype=torch.float64)[:, None] * config["rope_theta"] ** (-2 * i / size)
            a, b = x[..., i], x[..., i + size // 2]
            out[..., i] = a * angle.cos() - b * angle.sin()
            out[..., i + size // 2] = b * angle.cos() + a * angle.sin()
        return out

    x = w["model.embed_tokens.weight"][list(tokens)]
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (
            (h @ w[f"{layer}.self_attn.{name}_proj.weight"].t()).view(n, count, size)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = turn(q), turn(k)
        outs = []
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = (q[:, head] @ k[:, shared].t() / size**0.5).masked_fill(future, float("-inf"))
            outs.append(scores.softmax(-1) @ v[:, shared])
        x = x + torch.cat(outs, dim=-1) @ w[f"{layer}.self_attn.o_proj.weight"].t()
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (h @ w[f"{layer}.mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ w[f"{layer}.mlp.down_proj.weight"].t()
    head = w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return norm(x, "model.norm") @ head.t()


@pytest.mark.parametrize("shape", SHAPES, ids=["grouped", "untied", "one-kv-head"])
@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_logits_equal_an_independent_computation(
    tmp_path: Path, compute: Any, shape: dict[str, Any], mode: str
) -> None:
    path = build_tiny_model(tmp_path, **shape)
    tokens = text(150)
    expected = reference(path, tokens)
    computer = compute(mode, source=path)
    blocks, done = computer.blocks(len(tokens)), 0
    for count in (1, 15, 1, 64, 3, 66):
        logits = computer.run((tokens[done : done + count], done, blocks))
        done += count
        assert torch.allclose(logits[0].double(), expected[done - 1], atol=1e-3)
    assert done == len(tokens)


@pytest.mark.parametrize("mode", ["fast", "exact"])
def test_bfloat16_stays_near_float64(tiny: Path, compute: Any, mode: str) -> None:
    tokens = text(100)
    computer = compute(mode, "bfloat16")
    logits = computer.run((tokens, 0, computer.blocks(len(tokens))))[0].double()
    expected = reference(tiny, tokens)[-1]
    assert torch.nn.functional.cosine_similarity(logits, expected, dim=0) > 0.99


def check_bit_equality(
    computer: Any, tokens: tuple[int, ...], others: tuple[int, ...], chunks: tuple[int, ...], batches: int = 20
) -> None:
    """One by one, in chunks of any size, beside others in so many passes: the same bits in logits and KV."""
    n = len(tokens)
    blocks = computer.blocks(n)
    expected = [computer.run(((token,), i, blocks))[0] for i, token in enumerate(tokens)]
    kv = computer.kv(blocks, n)
    for size in (*chunks, n):
        again = computer.blocks(n)
        for start in range(0, n, size):
            end = min(start + size, n)
            logits = computer.run((tokens[start:end], start, again))
            assert torch.equal(logits[0], expected[end - 1]), f"logits at {end - 1} in chunks of {size}"
        assert torch.equal(computer.kv(again, n), kv), f"KV in chunks of {size}"
        computer.store.release(again)
    # In a batch: many decodes beside it, and a prompt that shares the pass.
    half, again, companion = max(n // 2, n - batches), computer.blocks(n), computer.blocks(len(others))
    computer.run((tokens[:half], 0, again), (others[:-20], 0, companion))
    crowd = [computer.blocks(1) for _ in range(14)]
    for i in range(half, n):
        at = len(others) - 20 + (i - half) % 20
        parts = [((token,), 0, block) for token, block in zip(others, crowd, strict=False)]
        logits = computer.run(*parts[:3], (tokens[i : i + 1], i, again), ((others[at],), at, companion), *parts[3:])
        assert torch.equal(logits[3], expected[i]), f"logits at {i} in a batch"
    assert torch.equal(computer.kv(again, n), kv), "KV in a batch"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=["grouped", "untied", "one-kv-head"])
def test_exact_mode_gives_the_same_bits_in_any_chunks_and_batch(
    tmp_path: Path, compute: Any, shape: dict[str, Any], dtype: str
) -> None:
    check_bit_equality(
        compute("exact", dtype, build_tiny_model(tmp_path, **shape)), text(210), text(70, 1), (2, 7, 16, 17, 64, 100)
    )


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_mode_gives_the_same_bits_with_real_weights(compute: Any, dtype: str) -> None:
    check_bit_equality(compute("exact", dtype, "smollm2"), text(67), text(40, 1), (7, 64), batches=5)


def test_uninitialised_memory_reaches_no_result(compute: Any) -> None:
    """Blocks hold whatever was there before, not-a-number too; only rows that were written count."""
    tokens = text(70)
    for mode in ("fast", "exact"):
        computer = compute(mode)
        clean = computer.run((tokens, 0, computer.blocks(len(tokens))))
        dirty = computer.blocks(len(tokens))
        for block in dirty:
            computer.store.memory(block)[:] = b"\xff" * computer.store.layout.block_bytes
        assert torch.equal(computer.run((tokens, 0, dirty)), clean)
