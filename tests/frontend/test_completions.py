"""Completions beyond plain text; what the sessions make is given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pdd_runtime.pipeline import Finish

Start = Callable[..., Awaitable[Any]]
LENGTH = Finish("length", 2)


async def test_an_echo_comes_before_the_answer_with_its_tokens(given: Start) -> None:
    server = await given(b"yz", LENGTH)
    for prompt in ("é", list("é".encode())):
        body = {"prompt": prompt, "echo": True, "logprobs": 1, "stop": "é"}
        answer = (await server.client.post("/v1/completions", json=body)).json()["choices"][0]
        assert answer["text"] == "éyz"
        logprobs = answer["logprobs"]
        assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "y", "z"]
        assert logprobs["text_offset"] == [0, 0, 1, 2]
        assert logprobs["token_logprobs"] == [None, None, -0.5, -0.5]


async def test_every_prompt_has_n_choices_in_order(given: Start) -> None:
    server = await given(b"!", LENGTH)
    body = {"prompt": ["a", "bc"], "n": 2, "echo": True, "seed": 1}
    answer = (await server.client.post("/v1/completions", json=body)).json()
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(0, "a!"), (1, "a!"), (2, "bc!"), (3, "bc!")]
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
    seeds = [request.sampling.seed for request in sorted(server.driver.requests, key=lambda r: (r.tokens, r.id))]
    assert seeds[0] == seeds[2] == 1
    assert seeds[1] == seeds[3] != 1


async def test_the_second_choice_of_a_prompt_begins_when_the_first_has_the_prompts_kv(given: Start) -> None:
    server = await given(LENGTH)
    begun: list[str] = []
    run = server.driver.run

    async def watched(request: Any) -> Any:
        begun.append(request.id)
        async for item in run(request):
            begun.append("made")
            yield item

    server.driver.run = watched
    await server.client.post("/v1/completions", json={"prompt": "a", "n": 2})
    assert begun[1] == "made"
