from __future__ import annotations

from typing import Any

import pytest
from pdd_sglang.requests import answer, body

from pdd_runtime.errors import EngineError, RequestError
from pdd_runtime.plugins.engine import Sampling, Token

EOS = frozenset({7, 8})


def parameters(sampling: Sampling) -> dict[str, Any]:
    found: dict[str, Any] = body("id", (1, 2), 5, sampling, "", EOS)["sampling_params"]
    return found


def test_the_linker_can_tell_whose_pages_it_sees() -> None:
    request = body("kv-1", (1, 2), 5, Sampling(), "", EOS)
    assert request["rid"] == request["session_id"] == "kv-1"
    assert request["input_ids"] == [1, 2]


def test_tenants_are_told_apart() -> None:
    assert body("id", (1,), 1, Sampling(), "tenant", EOS)["cache_salt"] == "tenant"
    assert "cache_salt" not in body("id", (1,), 1, Sampling(), "", EOS)


def test_it_stops_where_it_is_asked_to_and_nowhere_else() -> None:
    assert parameters(Sampling(stop_token_ids=(7, 8, 9)))["stop_token_ids"] == [7, 8, 9]
    for stops in ((), (9,), (7, 9)):
        found = parameters(Sampling(stop_token_ids=stops))
        assert found["ignore_eos"]
        assert "stop_token_ids" not in found


def test_a_filter_that_is_off_is_off() -> None:
    assert parameters(Sampling())["top_k"] == -1
    assert parameters(Sampling(top_k=4))["top_k"] == 4


def test_a_bias_names_tokens_and_goes_with_no_logprobs() -> None:
    assert parameters(Sampling(logit_bias=((3, 1.5),)))["logit_bias"] == {"3": 1.5}
    with pytest.raises(RequestError, match="ask for one"):
        body("id", (1,), 1, Sampling(logit_bias=((3, 1.5),), logprobs=1), "", EOS)


def event(**meta: Any) -> dict[str, Any]:
    return {"output_ids": [5, 6], "meta_info": {"id": "a", "cached_tokens": 8, **meta}}


def test_an_answer_has_positions_and_logprobs() -> None:
    told = answer(
        event(
            output_token_logprobs=[[-0.5, 5, None], [-1.5, 6, None]],
            output_top_logprobs=[[[-0.5, 5, None], [-2.0, 1, None]], [[-0.1, 2, None], [-1.5, 6, None]]],
        ),
        9,
        2,
    )
    assert told.tokens == (Token(9, 5, -0.5, ((5, -0.5), (1, -2.0))), Token(10, 6, -1.5, ((2, -0.1), (6, -1.5))))
    assert told.cached == 8
    assert not told.finished


def test_an_end_is_seen() -> None:
    for finish in ({"type": "length", "length": 2}, {"type": "stop", "matched": 6}):
        assert answer(event(finish_reason=finish), 9, None).finished


def test_what_sglang_gave_up_is_an_error_with_its_words() -> None:
    with pytest.raises(EngineError, match="out of memory"):
        answer(event(finish_reason={"type": "abort", "message": "out of memory"}), 9, None)
    before_it_began = {"id": "a", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
    with pytest.raises(EngineError, match="waiting queue"):
        answer({"output_ids": [], "meta_info": before_it_began}, 9, None)


def test_what_was_found_of_a_prompt_must_be_said() -> None:
    with pytest.raises(EngineError, match="what it had of a prompt"):
        answer({"output_ids": [5], "meta_info": {"id": "a"}}, 9, None)


@pytest.mark.parametrize("wrong", [None, {}, {"output_ids": ["a"]}, {"text": "hello", "meta_info": {}}])
def test_what_is_no_answer_is_an_error(wrong: Any) -> None:
    with pytest.raises(EngineError, match="no piece"):
        answer(wrong, 0, None)


def test_cumulative_logprobs_are_not_taken_for_new_ones() -> None:
    with pytest.raises(EngineError, match="incremental"):
        answer(event(output_token_logprobs=[[-0.5, 5, None]]), 9, 0)
