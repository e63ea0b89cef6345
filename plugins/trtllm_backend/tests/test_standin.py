"""The stand-in refuses what trtllm-serve refuses: what the engine is proven against must not be lenient."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from pdd_trtllm.config import TrtllmConfig
from pdd_trtllm.testing.arguments import parse
from pdd_trtllm.testing.driver import ConnectorDriver
from pdd_trtllm.testing.serve import PAUSE
from pdd_trtllm.testing.standin import running
from pdd_trtllm.testing.task import Task

from pdd_runtime.plugins.engine import ModelSpec, Sampling

CONTEXT = 512
ASK = {"model": "any", "prompt": [1, 2, 3], "max_tokens": 3, "detokenize": False, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def url(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Without a connector: what is asked for here needs none."""
    directory = tmp_path_factory.mktemp("server")
    config = TrtllmConfig(block_size=8, batch_limit=2, token_budget=64, context_length=CONTEXT)
    with running(config, ModelSpec(source=str(tiny)), directory, None, **{PAUSE: "0.02"}) as url:
        yield url


def post(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=ASK | fields, timeout=60)


def test_a_completion_is_of_token_ids(url: str) -> None:
    choice = post(url).raise_for_status().json()["choices"][0]
    assert len(choice["token_ids"]) == 3
    assert (choice["text"], choice["finish_reason"]) == ("", "length")


def test_a_stream_ends_with_done_and_says_why_it_ended(url: str) -> None:
    with httpx.stream("POST", f"{url}/v1/completions", json=ASK | {"stream": True}, timeout=60) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert '"finish_reason": "length"' in lines[-2]


def test_a_closed_connection_is_an_abort(url: str) -> None:
    body = ASK | {"stream": True, "max_tokens": CONTEXT - 3}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
    passes = []
    while some := httpx.get(f"{url}/metrics", timeout=60).json():
        passes += some
    assert 0 < len(passes) < CONTEXT - 3, "it was computed to its end"


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"tokens": [1]}, "tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [10**6]}, "out of range"),
        ({"prompt": [1] * CONTEXT}, "max_seq_len"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream is true"),
        ({"disaggregated_params": {"request_type": "context_only"}}, "transceiver"),
        ({"disaggregated_params": {"kind": "context_only"}}, "kind"),
    ],
)
def test_what_it_does_not_know_or_cannot_do_is_refused(url: str, fields: dict[str, Any], word: str) -> None:
    answer = post(url, **fields)
    assert answer.status_code == 400
    assert word in answer.text


def test_it_says_who_it_is_and_how_it_fares(url: str) -> None:
    assert httpx.get(f"{url}/version", timeout=60).json() == {"version": "1.2.1"}
    assert httpx.get(f"{url}/health", timeout=60).status_code == 200
    post(url, max_tokens=5)
    passes = httpx.get(f"{url}/metrics", timeout=60).json()
    assert passes[-1]["numActiveRequests"] == 1
    assert httpx.get(f"{url}/server_info", timeout=60).json() == {"disaggregated_params": {}}
    assert httpx.post(f"{url}/kv_cache_events", timeout=60).json() == []


@pytest.mark.parametrize(
    "argv",
    [
        ("serve",),
        ("serve", "m", "--max-batch-size", "3"),
        ("serve", "m", "--max_batch", "3"),
        ("serve", "m", "--log_level", "loud"),
    ],
)
def test_an_unknown_flag_ends_it(argv: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit):
        parse(argv)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("kv_cache: {}", "kv_cache"),
        ("kv_cache_config: {block_reuse: true}", "block_reuse"),
        ("kv_connector_config: {connector_module: m}", "connector_scheduler_class"),
        (
            "kv_connector_config: {connector_module: m, connector_scheduler_class: s, connector_worker_class: w}\n"
            "scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}",
            "no evict",
        ),
        ("[1]", "no mapping"),
    ],
)
def test_a_configuration_file_it_does_not_know_ends_it(text: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=word):
        parse(("serve", "m", "--extra_llm_api_options", str(file)))


class _Answers:
    """A scheduler's part that says what it is told to say."""

    def __init__(self, answer: tuple[object, object]) -> None:
        self.answer = answer

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[object, object]:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "error"),
    [((0, True), RuntimeError), ((3, False), RuntimeError), ((1.0, False), TypeError), ((-1, False), TypeError)],
)
def test_a_connector_that_answers_wrongly_ends_it(answer: tuple[object, object], error: type[Exception]) -> None:
    """Loading later with nothing to load; leaving no token to compute; what is no count."""
    driver = ConnectorDriver.__new__(ConnectorDriver)
    driver.scheduler = _Answers(answer)  # type: ignore[assignment]
    with pytest.raises(error):
        driver.match(Task(1, [1, 2, 3], 1, Sampling(), True, lambda tokens, finish: None), 0)
