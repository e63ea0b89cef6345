"""Requests and answers of /v1/completions."""

from __future__ import annotations

from typing import Any

import pytest
from pdd_vllm.completions import request, tokens_of

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import Sampling, Token

VOCAB = 100


def body(sampling: Sampling, tokens: tuple[int, ...] = (5, 6), salt: str = "") -> dict[str, Any]:
    return request(tokens, 8, sampling, salt, VOCAB)


def test_only_the_stop_tokens_that_are_given_end_an_answer() -> None:
    """Those that no token can be would be an error to vLLM."""
    made = body(Sampling(stop_token_ids=(7, 100, 10**6)))
    assert made["ignore_eos"] is True
    assert made["stop_token_ids"] == [7]


def test_a_request_names_its_tenant() -> None:
    made = body(Sampling(), salt="tenant")
    assert made["cache_salt"] == "tenant"
    assert made["prompt"] == [5, 6]
    assert "cache_salt" not in body(Sampling())


def test_sampling_is_passed_on_whole() -> None:
    sampling = Sampling(
        temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, logprobs=3, min_tokens=4, logit_bias=((9, -2.5), (8, 100.0))
    )
    made = body(sampling)
    for name in ("temperature", "top_k", "top_p", "min_p", "logprobs", "min_tokens"):
        assert made[name] == getattr(sampling, name)
    assert made["logit_bias"] == {"9": -2.5, "8": 100.0}
    assert body(Sampling(min_tokens=20))["min_tokens"] == 8, "vLLM takes no more than max_tokens"


def test_a_seed_is_another_one_behind_a_handoff_and_the_same_in_a_second_run() -> None:
    seeds = {body(Sampling(seed=2**64 - 1), tuple(range(n)))["seed"] for n in range(1, 50)}
    assert len(seeds) == 49
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert body(Sampling(seed=3))["seed"] == body(Sampling(seed=3))["seed"] != body(Sampling(seed=4))["seed"]


def choice(ids: list[int], **more: Any) -> dict[str, Any]:
    return {"index": 0, "text": "", "token_ids": ids, "finish_reason": None, **more}


def test_tokens_have_positions_in_order() -> None:
    assert tokens_of(choice([4, 9]), 30, None) == (Token(30, 4), Token(31, 9))
    assert tokens_of(choice([], finish_reason="stop"), 30, None) == ()


def test_logprobs_are_the_likeliest_best_first_without_a_chosen_one_that_is_none_of_them() -> None:
    found = {
        "token_logprobs": [-3.0],
        "tokens": ["token_id:4"],
        "top_logprobs": [{"token_id:4": -3.0, "token_id:8": -0.5, "token_id:2": -1.5}],
    }
    assert tokens_of(choice([4], logprobs=found), 3, 2) == (Token(3, 4, -3.0, ((8, -0.5), (2, -1.5))),)
    assert tokens_of(choice([4], logprobs=found), 3, 0) == (Token(3, 4, -3.0, ()),)


@pytest.mark.parametrize(
    "broken",
    [
        {"index": 0, "text": "a"},
        choice([4], logprobs=None),
        choice([4, 5], logprobs={"token_logprobs": [-1.0], "top_logprobs": [None]}),
        choice([4], logprobs={"token_logprobs": [-1.0], "top_logprobs": [{"word": -1.0}]}),
        choice([], finish_reason="abort"),
    ],
)
def test_what_is_no_answer_of_this_kind_is_an_error_of_the_engine(broken: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        tokens_of(broken, 3, 1)
