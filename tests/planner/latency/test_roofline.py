"""Against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pdd_runtime.planner.figures import FigureError
from pdd_runtime.planner.hardware import Hardware
from pdd_runtime.planner.latency import Roofline, RooflineConfig
from pdd_runtime.planner.latency.roofline import SPREAD, WHOLE
from pdd_runtime.planner.model_spec import ModelFigures

CHIP = Hardware.model_validate(
    {"compute": "100TFLOP/s", "memory": "100GB", "bandwidth": "1TB/s", "interconnect": "100GB/s", "network": "10GB/s"}
)
DENSE = ModelFigures(parameters=10e9, layers=10, hidden=1000, attention=1e6, kv_token=1e5, kv_constant=1e6)
IDEAL: dict[str, Any] = {"compute": 1.0, "bandwidth": 1.0, "network": 1.0, "memory": 1.0, "layer": "0s"}


def roofline(hardware: str = "ours", model: ModelFigures = DENSE, chip: Hardware = CHIP, **changed: Any) -> Roofline:
    config = {"hardware": hardware, "model": "m", "chip": chip, "figures": model, **IDEAL, **changed}
    return Roofline(RooflineConfig.model_validate(config))


def test_a_long_pass_takes_its_arithmetic() -> None:
    # 2 x 10e9 FLOPs a token and 1e6 a pair, of which there are 1000 x 1001 / 2 and 1000 x 500.
    flops = 2e10 * 1000 + 1e6 * (500_500 + 500_000)
    assert roofline().prefill(1000, 500) == pytest.approx(flops / 100e12)
    assert roofline(compute=0.5).prefill(1000, 500) == pytest.approx(flops / 50e12)


def test_a_step_takes_reading_weights_and_kv() -> None:
    read = 2 * 10e9 + 4 * (1e6 + 1e5 * 2000)
    assert roofline().decode(4, 2000) == pytest.approx(read / 1e12)
    assert roofline(bandwidth=0.5).decode(4, 2000) == pytest.approx(read / 0.5e12)
    # So does a pass that is short enough.
    assert roofline().prefill(1, 2000) == pytest.approx((2e10 + 1e6 + 1e5 * 2000) / 1e12)


def test_a_batch_that_is_large_enough_takes_its_arithmetic() -> None:
    assert roofline().decode(2000, 0) == pytest.approx(2000 * 2e10 / 100e12)


def test_chips_share_the_work_and_pay_for_talking() -> None:
    # Of two all-reduces in each of 10 layers a chip of four sends 2 x 3/4 x 1000 numbers of two bytes.
    exchange = 10 * 2 * 2 * 0.75 * 2000 / 100e9
    work = (2e10 * 1000 + 1e6 * 500_500) / 100e12
    assert roofline("4xours").prefill(1000, 0) == pytest.approx(work / 4 + 1000 * exchange)
    # Two nodes: within each as among 8, and between them an eighth a chip.
    between = 10 * 2 * 2 * 0.5 * 2000 / (8 * 10e9)
    within = 10 * 2 * 2 * 7 / 8 * 2000 / 100e9
    assert roofline("2x8xours").prefill(1000, 0) == pytest.approx(work / 16 + 1000 * (within + between))
    assert roofline("4xours", network=0.5).prefill(1000, 0) == pytest.approx(work / 4 + 2000 * exchange)


def test_a_token_of_a_mixture_of_experts_reads_and_computes_its_own() -> None:
    # 100 experts of 0.8e9, of which a token goes to 10, and 2e9 for all.
    mixture = DENSE.model_copy(update={"parameters": 82e9, "active": 10e9, "experts": 100, "experts_active": 10})
    assert (mixture.dense, mixture.routed) == (pytest.approx(2e9), pytest.approx(80e9))
    one, two = roofline("2xours", mixture).decode(1, 0), roofline("2xours", mixture).decode(2, 0)
    kv, exchange = 1e6, 10 * 3 * 1000 * 10 * 0.5 / 2 / 100e9
    assert one == pytest.approx((2 * 10e9 + kv) / 2e12 + exchange)
    # The second one's experts are in part the same.
    assert two == pytest.approx((2 * (2e9 + 80e9 * 0.19) + 2 * kv) / 2e12 + 2 * exchange)


def test_attention_to_few_tokens_costs_no_more_behind_many() -> None:
    sparse = DENSE.model_copy(update={"attends": 100, "index": 10.0, "attention": 1e9})
    model = roofline(model=sparse)
    flops = 2e10 * 1000 + 1e9 * (1000 * 100) + 10 * (1000 * 5000 + 500_500)
    assert model.prefill(1000, 5000) == pytest.approx(flops / 100e12)
    # The first 99 tokens of a prompt see fewer.
    flops = 2e10 * 1000 + 1e9 * (100 * 101 / 2 + 900 * 100) + 10 * 500_500
    assert model.prefill(1000, 0) == pytest.approx(flops / 100e12)


def test_phases_of_a_chip_that_was_compared_scale() -> None:
    slow = CHIP.model_copy(update={"prefill": 0.5, "decode": 0.25})
    assert roofline(chip=slow).prefill(1000, 0) == pytest.approx(2 * roofline().prefill(1000, 0))
    assert roofline(chip=slow).decode(1, 1000) == pytest.approx(4 * roofline().decode(1, 1000))


def test_eight_bit_arithmetic_is_used_where_model_and_chip_have_it() -> None:
    fp8 = DENSE.model_copy(update={"compute": "fp8", "weight_bytes": 1.0})
    fast = CHIP.model_copy(update={"compute_fp8": 200e12})
    assert roofline(model=fp8, chip=fast).prefill(1000, 0) == pytest.approx(roofline().prefill(1000, 0) / 2)
    assert roofline(model=fp8).prefill(1000, 0) == roofline().prefill(1000, 0)
    assert roofline(chip=fast).prefill(1000, 0) == roofline().prefill(1000, 0)


def test_kv_has_what_the_weights_leave() -> None:
    assert roofline().capacity(10) == (100e9 - 20e9 - 10 * 1e6) // 1e5
    assert roofline(kv_bits=8).capacity(10) == (100e9 - 20e9 - 10 * 0.5e6) // 0.5e5
    assert (roofline(kv_bits=8).kv_constant, roofline(kv_bits=8).kv_token) == (0.5e6, 0.5e5)
    with pytest.raises(FigureError, match="no KV of 100000 requests of m fits on ours"):
        roofline().capacity(100_000)


def test_weights_that_do_not_fit_are_told() -> None:
    with pytest.raises(FigureError) as caught:
        Roofline(RooflineConfig(hardware="8xh100", model="deepseek-v4-pro"))
    assert caught.value.what == "deepseek-v4-pro does not fit on 8xh100"
    assert caught.value.why == "its weights are 864 GB, and theirs is 90% of 640 GB"


def test_it_says_what_it_assumes() -> None:
    source = Roofline(RooflineConfig(hardware="8xh200", model="deepseek-v3", compute=0.4)).source
    assert source.startswith("roofline of deepseek-v3 on 8xh200: 40% of its compute, 45% of its memory bandwidth")


def test_kernels_reach_less_where_experts_are_spread_over_chips() -> None:
    reached = {
        (hardware, model): Roofline(RooflineConfig(hardware=hardware, model=model)).reached
        for hardware, model in (("8xh200", "deepseek-v3"), ("h100", "qwen3-30b-a3b"), ("8xh100", "llama-3.1-70b"))
    }
    assert reached["8xh200", "deepseek-v3"] == SPREAD
    assert reached["h100", "qwen3-30b-a3b"] == reached["8xh100", "llama-3.1-70b"] == WHOLE


def test_published_figures_give_what_is_known_of_common_pairs() -> None:
    """An 8B model in 16 bits on an H100: a step reads 16 GB, and kernels take 6 to 9 ms; a prompt of 8,192 tokens takes
    200 to 250 ms."""
    model = Roofline(RooflineConfig(hardware="h100", model="llama-3.1-8b"))
    assert 0.006 < model.decode(1, 1000) < 0.009
    assert 0.2 < model.prefill(8192, 0) < 0.25


@pytest.mark.parametrize("changed", [{"compute": 0}, {"compute": 1.5}, {"network": -1}, {"layers": 3}, {"kv_bits": 3}])
def test_settings_are_checked(changed: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RooflineConfig.model_validate({"hardware": "h100", "model": "llama-3.1-8b", **changed})
