"""How near a roofline comes to kernels that were measured: its shares fitted to the grids of `aiconfigurator-core`, and
how far off it is with them, and with its defaults. A grid takes seconds, and is kept.

    pip install 'pdd-runtime[aiconfigurator]' && python bench/latency.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from pdd_runtime.errors import PddError
from pdd_runtime.planner.latency import Aiconfigurator, AiconfiguratorConfig, Roofline, RooflineConfig
from pdd_runtime.plugins.latency import LatencyModel

FP8: dict[str, Any] = {"kv_bits": 8, "options": {"fmha_quant_mode": "bfloat16"}}
V4: dict[str, Any] = {"kv_bits": 8, "options": {"fmha_quant_mode": "bfloat16", "moe_quant_mode": "fp8_block"}}
CASES: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("h100", "meta-llama/Meta-Llama-3.1-8B", "vllm", {}),
    ("h200", "meta-llama/Meta-Llama-3.1-8B", "sglang", {}),
    ("2xh100", "Qwen/Qwen3-32B", "vllm", {}),
    ("8xh100", "meta-llama/Meta-Llama-3.1-70B", "sglang", {}),
    ("h100", "Qwen/Qwen3-30B-A3B", "sglang", {}),
    ("8xh200", "Qwen/Qwen3-235B-A22B", "sglang", {}),
    ("8xh200", "Qwen/Qwen3-235B-A22B", "vllm", {}),
    ("8xh200", "deepseek-ai/DeepSeek-V3", "trtllm", FP8),
    ("8xh200", "deepseek-ai/DeepSeek-V3", "vllm", FP8),
    ("8xh200", "deepseek-ai/DeepSeek-V3", "sglang", FP8),
    ("8xh200", "deepseek-ai/DeepSeek-V4-Pro", "sglang", V4),
)
PASSES = [(new, context) for new in (1, 16, 256, 1024, 8192) for context in (0, 4096, 16_384, 65_536)]
STEPS = [(batch, context) for batch in (1, 4, 16, 64, 256) for context in (1024, 4096, 16_384, 65_536)]


def answers(model: LatencyModel) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Logarithms of seconds."""

    def each() -> Iterator[float]:
        yield from (model.prefill(*point) for point in PASSES)
        yield from (model.decode(*point) for point in STEPS)

    return np.log(np.fromiter(each(), float))


def off(difference: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    """The median and the 90th percentile of how far off, as factors."""
    far = np.exp(np.abs(difference))
    return f"{np.median(far) - 1:6.0%} {np.quantile(far, 0.9) - 1:6.0%}"


def main() -> None:
    logging.disable(logging.WARNING)
    print(f"{'':10}{'':34}{'':8} {'fitted':^27}   {'off, fitted':^13}   {'off, defaults':^13}")
    print(f"{'hardware':10}{'model':34}{'kernels':8} compute  memory     layer   median    p90   median    p90")
    for hardware, model, backend, more in CASES:
        settings = {"hardware": hardware, "model": model, "backend": backend, **more}
        try:
            truth = answers(Aiconfigurator(AiconfiguratorConfig.model_validate(settings)))
        except PddError as error:
            print(f"{hardware:10}{model:34}{backend:8} {error.what}: {error.why}")
            continue
        usual = RooflineConfig(hardware=hardware, model=model, kv_bits=more.get("kv_bits"))
        roofline: Callable[..., Roofline] = lambda shares, usual=usual: Roofline(  # noqa: E731
            usual.model_copy(update=dict(zip(("compute", "bandwidth", "layer"), map(float, shares), strict=True)))
        )
        fit = least_squares(
            lambda shares, roofline=roofline, truth=truth: answers(roofline(shares)) - truth,
            [0.5, 0.6, 5e-5],
            bounds=([0.02, 0.05, 1e-7], [1, 1, 1e-3]),
            loss="soft_l1",
            x_scale=[0.5, 0.5, 1e-4],
        )
        compute, bandwidth, layer = fit.x
        fitted, default = off(answers(roofline(fit.x)) - truth), off(answers(Roofline(usual)) - truth)
        shares = f"{compute:7.0%} {bandwidth:7.0%} {layer * 1e6:7.0f}us"
        print(f"{hardware:10}{model:34}{backend:8} {shares}   {fitted}   {default}", flush=True)


if __name__ == "__main__":
    main()
