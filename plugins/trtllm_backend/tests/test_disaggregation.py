"""The stand-in's disaggregated serving, asked as TensorRT-LLM's own orchestrator asks: what the native data plane is
proven against must not be lenient, and the KV really crosses from one process to the other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from pdd_trtllm.config import TrtllmConfig
from pdd_trtllm.sampling import PATH, completion, context, generation
from pdd_trtllm.testing.standin import running
from pdd_trtllm.testing.transceiver import LINE

from pdd_runtime.graph import Role
from pdd_runtime.plugins.engine import ModelSpec, Sampling
from tests.waiting import PATIENCE

CONTEXT, PAGE = 96, 8
GREEDY = Sampling(temperature=0)
_prompts = itertools.count(1)


@pytest.fixture(scope="module")
def giver(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tiny, tmp_path_factory.mktemp("giver"), "prefill", "60s") as url:
        yield url


@pytest.fixture(scope="module")
def reader(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tiny, tmp_path_factory.mktemp("reader"), "main", "60s") as url:
        yield url


@pytest.fixture(scope="module")
def hasty(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Keeps nothing for long, and waits for nothing long."""
    with serving(tiny, tmp_path_factory.mktemp("hasty"), "prefill", "300ms") as url:
        yield url


@pytest.fixture(scope="module")
def slow(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Behind a line that takes long."""
    with serving(tiny, tmp_path_factory.mktemp("slow"), "prefill", "60s", **{LINE: "3"}) as url:
        yield url


def serving(model: Path, directory: Path, role: Role, timeout: str, **env: str) -> AbstractContextManager[str]:
    config = TrtllmConfig.model_validate(
        {
            **{"data_plane": "native", "transfer_timeout": timeout, "block_size": PAGE},
            **{"batch_limit": 4, "context_length": CONTEXT, "token_budget": 64},
        }
    )
    return running(config, ModelSpec(source=str(model)), directory, None, role, **env)


def prompt(n: int = 3 * PAGE + 5) -> list[int]:
    """One that no server has seen."""
    number = next(_prompts)
    return [3 + (number * 31 + index * index) % 190 for index in range(n)]


def ask(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}{PATH}", json=body, timeout=60)


def asked(url: str, body: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = ask(url, body).raise_for_status().json()["choices"][0]
    return choice


def offered(giver: str, tokens: list[int]) -> dict[str, Any]:
    params: dict[str, Any] = asked(giver, context(tokens))["disaggregated_params"]
    return params


def plain(tokens: list[int], n: int) -> dict[str, Any]:
    return completion(tokens, n, GREEDY) | {"stream": False}


def passes(url: str) -> list[dict[str, Any]]:
    """Since the last look."""
    found: list[dict[str, Any]] = httpx.get(f"{url}/metrics", timeout=60).json()
    return found


def used(url: str) -> int:
    """Pages in use. Seen by a pass of another request: while nothing is computed, the server says nothing."""
    passes(url)
    asked(url, plain(prompt(2), 1))
    return int(passes(url)[-1]["kvCacheStats"]["usedNumBlocks"])


def settled(url: str) -> None:
    """Return when only the page is in use that shows it."""
    until = time.monotonic() + PATIENCE
    while used(url) > 1:
        assert time.monotonic() < until


def test_a_context_is_gone_on_with_elsewhere_without_a_token_of_it_being_computed(giver: str, reader: str) -> None:
    tokens = prompt()
    answer = ask(giver, context(tokens)).raise_for_status().json()
    choice = answer["choices"][0]
    params = choice["disaggregated_params"]
    assert answer["prompt_token_ids"] == tokens
    assert choice["finish_reason"] == "length"
    assert params["first_gen_tokens"] == choice["token_ids"]
    asked(reader, plain(prompt(2), 1))
    passes(reader)
    made = asked(reader, generation(tokens, params) | {"max_tokens": 9})["token_ids"]
    assert len(passes(reader)) == 8, "more than the passes that make a token each"
    assert made == asked(giver, plain(tokens, 9))["token_ids"]


def test_what_was_read_is_found_by_others_with_its_tail(giver: str, reader: str) -> None:
    tokens = prompt()
    first = asked(reader, generation(tokens, offered(giver, tokens)))["token_ids"]
    answer = ask(reader, plain([*tokens, *first], 3)).raise_for_status().json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == len(tokens)
    assert answer["choices"][0]["token_ids"] == asked(giver, plain(tokens, 4))["token_ids"][1:]


def test_a_part_of_the_prompt_that_the_reader_has_is_not_sent(giver: str, reader: str) -> None:
    """And yet all of it is right."""
    tokens = prompt()
    asked(reader, plain(tokens[: 2 * PAGE + 1], 1))
    answer = ask(reader, generation(tokens, offered(giver, tokens)) | {"max_tokens": 4}).raise_for_status().json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * PAGE + 1
    assert answer["choices"][0]["token_ids"] == asked(giver, plain(tokens, 4))["token_ids"]


def test_a_second_reader_waits_in_vain(giver: str, reader: str, hasty: str) -> None:
    tokens = prompt()
    params = offered(giver, tokens)
    asked(reader, generation(tokens, params))
    refused(ask(hasty, generation(tokens, params)), "timed out")


def test_a_late_reader_is_refused(hasty: str, reader: str) -> None:
    tokens = prompt()
    params = offered(hasty, tokens)
    settled(hasty)
    refused(ask(reader, generation(tokens, params)), "Error in kv cache transfer")


def test_what_is_kept_is_in_use_until_its_time_is_over(giver: str, hasty: str) -> None:
    before = used(giver)
    offered(giver, prompt(4 * PAGE))
    assert used(giver) >= before + 4
    offered(hasty, prompt(4 * PAGE))
    settled(hasty)


def test_a_reader_whose_client_goes_is_free_while_the_kv_is_on_its_way(slow: str, reader: str) -> None:
    """And so is what was kept for it."""
    tokens = prompt()
    params = offered(slow, tokens)
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{reader}{PATH}", json=generation(tokens, params), timeout=0.5)
    settled(reader)
    settled(slow)
    assert asked(reader, plain(tokens, 4)) == asked(slow, plain(tokens, 4))


@pytest.mark.parametrize(
    "change",
    [
        {"ctx_request_id": None},
        {"ctx_request_id": 7},
        {"first_gen_tokens": None},
        {"first_gen_tokens": [5]},
        {"encoded_opaque_state": None},
        {"encoded_opaque_state": "AAAA"},
        {"draft_tokens": [1, 2]},
        {"ctx_dp_rank": 1},
    ],
)
def test_parameters_that_are_not_passed_on_whole_are_refused(giver: str, reader: str, change: dict[str, Any]) -> None:
    tokens = prompt()
    refused(ask(reader, generation(tokens, offered(giver, tokens) | change)), "")


def test_another_prompt_is_refused(giver: str, reader: str) -> None:
    """The real one would compute with the wrong KV."""
    tokens = prompt()
    refused(ask(reader, generation([*tokens, 9], offered(giver, tokens))), "prompt")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"disaggregated_params": {"request_type": "context"}}, "Unknown request type"),
        ({"disaggregated_params": {"request_type": "context_only", "room": 1}}, "room"),
        ({"stream": True}, "streamed"),
        ({"prompt": [5] * CONTEXT}, "max_seq_len"),
    ],
)
def test_a_context_that_cannot_be_is_refused(giver: str, change: dict[str, Any], word: str) -> None:
    refused(ask(giver, context(prompt()) | change), word)


def test_where_passes_overlap_there_are_no_contexts(reader: str) -> None:
    refused(ask(reader, context(prompt())), "overlap")


def test_the_longest_prompt_is_kept(giver: str, reader: str) -> None:
    tokens = prompt(CONTEXT - 1)
    assert len(asked(reader, generation(tokens, offered(giver, tokens)))["token_ids"]) == 1


def test_where_no_more_than_one_token_is_wanted_nothing_is_kept(giver: str) -> None:
    choice = asked(giver, context(prompt()) | {"max_tokens": 1})
    assert choice["disaggregated_params"] is None
    assert choice["finish_reason"] == "length"


def test_a_context_that_ends_with_its_first_token_is_not_kept(giver: str) -> None:
    tokens = prompt()
    [first] = asked(giver, plain(tokens, 1))["token_ids"]
    choice = asked(giver, context(tokens) | {"stop_token_ids": [first]})
    assert (choice["finish_reason"], choice["disaggregated_params"]) == ("stop", None)


def test_both_at_once_is_an_ordinary_request(giver: str) -> None:
    tokens = prompt()
    body = plain(tokens, 3) | {"disaggregated_params": {"request_type": "context_and_generation"}}
    assert asked(giver, body)["token_ids"] == asked(giver, plain(tokens, 3))["token_ids"]


def test_the_cache_tells_what_it_keeps_once(giver: str) -> None:
    tokens = prompt(2 * PAGE + 3)
    httpx.post(f"{giver}/kv_cache_events", timeout=60)
    asked(giver, plain(tokens, 1))
    events = httpx.post(f"{giver}/kv_cache_events", timeout=60).json()
    stored = [event["data"] for event in events if event["data"]["type"] == "stored"]
    blocks = [[token["token_id"] for token in block["tokens"]] for data in stored for block in data["blocks"]]
    assert blocks == [tokens[:PAGE], tokens[PAGE : 2 * PAGE], tokens[2 * PAGE :]], "two full pages, later the tail"
    assert stored[0]["parent_hash"] is None
    assert stored[1]["parent_hash"] == stored[0]["blocks"][-1]["block_hash"]
    assert httpx.post(f"{giver}/kv_cache_events", timeout=60).json() == []


def refused(answer: httpx.Response, word: str) -> None:
    assert answer.status_code == 400, answer.text
    assert word in answer.text
