from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from pdd_runtime.planner.figures import FigureError
from pdd_runtime.planner.model_spec import ModelFigures, known_models, model_figures

DENSE = {"parameters": 8e9, "layers": 32, "hidden": 4096, "attention": 5e5, "kv_token": 131072}


@pytest.mark.parametrize(
    ("name", "layers", "width"),
    # Heads that have KV times their width; of latent attention what is kept of both.
    [
        ("llama-3.1-8b", 32, 2 * 8 * 128),
        ("llama-3.1-70b", 80, 2 * 8 * 128),
        ("qwen3-8b", 36, 2 * 8 * 128),
        ("qwen3-32b", 64, 2 * 8 * 128),
        ("qwen3-30b-a3b", 48, 2 * 4 * 128),
        ("qwen3-235b-a22b", 94, 2 * 4 * 128),
        ("glm-4.7", 92, 2 * 8 * 128),
        ("deepseek-v3", 61, 512 + 64),
        ("kimi-k2", 61, 512 + 64),
        # Half of its layers see a window only.
        ("gpt-oss-120b", 18, 2 * 8 * 64),
    ],
)
def test_kv_follows_from_the_models_shape(name: str, layers: int, width: int) -> None:
    model = model_figures(name)
    assert model.kv_token == layers * width * 2
    assert model.kv(8)[1] == layers * width


def test_some_models_have_kv_that_does_not_grow() -> None:
    constant, token = model_figures("deepseek-v4-pro").kv(8)
    assert (constant, token) == (4.56e6, 4505)
    assert model_figures("deepseek-v4-pro").kv(16) == (2 * constant, 2 * token)


def test_every_model_is_whole_and_says_where_it_is_from() -> None:
    for name, model in known_models().items():
        assert model.source, name
        assert 0 < model.dense <= model.each_token <= model.parameters, name
        assert model.dense + model.routed == pytest.approx(model.parameters), name
        # What a token goes through: all that is dense, and its experts.
        mine = model.dense + model.routed * model.experts_active / model.experts
        assert mine == pytest.approx(model.each_token), name


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3", "DeepSeek-V3", "/models/deepseek-v3/", "deepseek-v3"])
def test_a_model_is_found_as_its_publisher_writes_it(name: str) -> None:
    assert model_figures(name) == known_models()["deepseek-v3"]
    assert model_figures("meta-llama/Meta-Llama-3.1-8B-Instruct") == known_models()["llama-3.1-8b"]
    assert model_figures("meta-llama/Llama-3.3-70B-Instruct").kv_token == known_models()["llama-3.1-70b"].kv_token


def test_models_of_ones_own_come_first() -> None:
    mine = ModelFigures.model_validate({"like": "deepseek-v3", "kv_token": 35136, "kv_bits": 8})
    found = model_figures("org/mine", {"org/mine": mine})
    assert found.kv(16) == known_models()["deepseek-v3"].kv(16)
    assert found.source == "like deepseek-v3"
    with pytest.raises(
        FigureError, match=r'no figures of a model called "lama-3.1-8b".*\n.*\n.*did you mean "llama-3.1-8b"'
    ):
        model_figures("meta/Lama-3.1-8B")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"active": 9e9}, "active is above parameters"),
        ({"experts": 8, "experts_active": 9}, "experts_active is above experts"),
        ({"experts": 8, "experts_active": 4, "active": 1e9}, "active is too small for experts_active of its experts"),
        ({"layers": 0}, "greater than or equal to 1"),
        ({"like": "gpt-9"}, 'there is none called "gpt-9" to be like'),
    ],
)
def test_figures_that_do_not_fit_together_are_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        ModelFigures.model_validate({**DENSE, **changed})
