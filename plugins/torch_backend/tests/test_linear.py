from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pdd_torch.linear import Linears

LESSER = [
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
]
"""What a CPU with fewer instructions would use, as the libraries' own settings. More than it has, no setting gives."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 128), (576, 960), (1536, 576), (63, 250)])
def test_an_exact_row_is_the_same_among_any_others(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(*shape, generator=generator).to(dtype)
    x = torch.randn(150, shape[0], generator=generator).to(dtype)
    for stored in (weight, weight.t().contiguous().t()):
        product = Linears(exact=True, most_rows=128).make(stored)
        expected = product(x)
        for rows in (*range(1, 70), 100, 127, 128, 129):
            assert torch.equal(product(x[:rows]), expected[:rows]), f"{rows} rows"
        for start in (1, 17, 100):
            assert torch.equal(product(x[start : start + 3]), expected[start : start + 3])


def test_fast_and_exact_products_are_products() -> None:
    weight, x = torch.randn(64, 96), torch.randn(37, 64)
    for exact in (False, True):
        product = Linears(exact=exact, most_rows=128).make(weight)
        for rows in (1, 5, 37):
            assert torch.allclose(product(x[:rows]), x[:rows] @ weight, atol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("settings", LESSER, ids=["avx512 without bfloat16", "avx2"])
def test_exact_mode_holds_with_the_kernels_of_lesser_processors(settings: dict[str, str]) -> None:
    here = Path(__file__).parent
    chosen = "same_bits and grouped"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, str(here)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
