"""Run by the interpreter that has vLLM: pages as its own operation writes them, through the connector and back.

Prints a JSON line for each case: what, whether it is exact, and GB/s of a save and of a load.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import torch
from pdd_connector.vllm.connector import _copier, cache_layout
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import AttentionType, CPUAttentionBackendImpl, _get_attn_isa

LAYERS, PAGES, TOKENS, HEADS = 3, 40, 32, 4
INTEGER = {2: np.uint16, 4: np.uint32}


class Impl:
    """vLLM's own operation, of an attention that is not there."""

    attn_type, kv_cache_dtype = AttentionType.DECODER, "auto"

    def do_kv_cache_update(self, layer: object, key: object, value: object, cache: object, slots: object) -> None:
        CPUAttentionBackendImpl.do_kv_cache_update(self, layer, key, value, cache, slots)


def check(dtype: torch.dtype, dim: int, isa: str) -> dict[str, object]:
    buffer = torch.zeros((LAYERS, PAGES, HEADS, TOKENS, 2 * dim), dtype=dtype)
    caches = list(buffer)
    layers = [
        SimpleNamespace(impl=Impl(), isa=isa, kv_cache=cache, _k_scale_float=1.0, _v_scale_float=1.0)
        for cache in caches
    ]
    layout = cache_layout(layers, caches, TOKENS)
    copier = _copier(caches[0], layout)
    page, other = 7, 30
    kv = torch.randn((LAYERS, 2, TOKENS, HEADS, dim)).to(dtype)
    slots = torch.arange(TOKENS) + page * TOKENS
    for layer, cache, (key, value) in zip(layers, caches, kv, strict=True):
        layer.impl.do_kv_cache_update(layer, key, value, cache, slots)
    bits = kv.view(torch.int16 if dtype.itemsize == 2 else torch.int32).numpy().view(INTEGER[dtype.itemsize])
    block = np.zeros_like(bits)
    copier.save([page], lambda saved: saved.copy(0, block, TOKENS))
    copier.load([other], [block], [TOKENS])
    exact = bool(np.array_equal(block, bits)) and torch.equal(buffer[:, page], buffer[:, other])
    untouched = not buffer[:, [n for n in range(PAGES) if n not in (page, other)]].any()
    blocks = [np.zeros_like(bits) for _ in range(PAGES)]
    pages = list(range(PAGES))

    def save() -> None:
        copier.save(pages, lambda saved: [saved.copy(n, one, TOKENS) for n, one in enumerate(blocks)])

    def load() -> None:
        copier.load(pages, blocks, [TOKENS] * PAGES)

    size = buffer.numel() * buffer.element_size()
    speeds = {act.__name__: round(size / best(act) / 1e9, 2) for act in (save, load)}
    return {"dtype": str(dtype), "dim": dim, "isa": isa, "exact": exact and untouched, **speeds}


def best(act: object) -> float:
    times = []
    for _ in range(5):
        start = perf_counter()
        act()  # type: ignore[operator]
        times.append(perf_counter() - start)
    return min(times)


def main() -> None:
    current_platform.import_kernels()
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for dim in (64, 80, 128):
            print(json.dumps(check(dtype, dim, _get_attn_isa(dtype, TOKENS, dim))))
        print(json.dumps(check(dtype, 64, "vec16")))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
