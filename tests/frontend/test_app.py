"""The shape of every answer, over real HTTP; what the sessions make is given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import msgspec
import pytest

from pdd_runtime.errors import CapacityError, NoRoute, RequestError, WorkerLost
from pdd_runtime.frontend.body import MAX_BODY
from pdd_runtime.pipeline import Finish
from pdd_runtime.testing.byte_tokenizer import END, byte_tokenizer
from tests.waiting import until

Start = Callable[..., Awaitable[Any]]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
LENGTH = Finish("length", 2)


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The data of every event, `[DONE]` as text."""
    async with client.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        return [data async for data in _events(response)]


async def _events(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


async def test_a_whole_chat_answer_has_openais_form(given: Start) -> None:
    server = await given("héllo 🎉".encode(), LENGTH)
    response = await server.client.post("/v1/chat/completions", json=CHAT)
    answer = response.json()
    assert response.headers["x-pdd-request-id"] == server.driver.requests[0].id
    assert answer["id"] == "chatcmpl-" + server.driver.requests[0].id.removeprefix("req-")
    assert (answer["object"], answer["model"]) == ("chat.completion", "given")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "héllo 🎉", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    prompt = len(server.driver.requests[0].tokens)
    assert answer["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 11,
        "total_tokens": prompt + 11,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


async def test_a_chat_stream_has_openais_form(given: Start) -> None:
    server = await given("né".encode(), END, Finish("stop", 0))
    got = await events(server.client, "/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True}})
    *chunks, usage, done = got
    assert done == "[DONE]"
    assert {(chunk["object"], chunk["id"]) for chunk in chunks} == {("chat.completion.chunk", usage["id"])}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 4)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "né"
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] for choice in choices[-2:]] == [None, "stop"]


async def test_without_being_asked_a_stream_says_nothing_of_usage(given: Start) -> None:
    server = await given(b"a", LENGTH)
    got = await events(server.client, "/v1/completions", {"prompt": "x"})
    assert all("usage" not in chunk for chunk in got[:-1])


async def test_what_is_queued_goes_out_as_one_chunk(given: Start) -> None:
    gate = asyncio.Event()
    gate.set()
    server = await given(b"all of this is there at once", gate, LENGTH)
    got = await events(server.client, "/v1/completions", {"prompt": "x"})
    assert [chunk["choices"][0]["text"] for chunk in got[:-1]] == ["all of this is there at once", ""]


async def test_what_is_made_goes_out_at_once(given: Start) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    server = await given(b"a", gates[0], b"b", gates[1], b"c", LENGTH)
    body = {"prompt": "x", "stream": True}
    async with asyncio.timeout(5), server.client.stream("POST", "/v1/completions", json=body) as response:
        lines = _events(response)
        texts = []
        for gate in gates:
            texts.append((await anext(lines))["choices"][0]["text"])
            gate.set()
        texts.append((await anext(lines))["choices"][0]["text"])
    assert texts == ["a", "b", "c"]


async def test_a_character_over_several_tokens_is_never_cut(given: Start) -> None:
    gates = [asyncio.Event() for _ in range(3)]
    data = "🎉".encode()
    server = await given(b"a", data[:1], gates[0], data[1:2], gates[1], data[2:3], gates[2], data[3:], LENGTH)
    for gate in gates:
        gate.set()
    got = await events(server.client, "/v1/completions", {"prompt": "x"})
    assert "".join(chunk["choices"][0]["text"] for chunk in got[:-1]) == "a🎉"


async def test_completions_have_a_choice_for_every_prompt(given: Start) -> None:
    server = await given(b"ok", LENGTH)
    for prompt in (["a", "bc"], [[97], [98, 99]]):
        answer = (await server.client.post("/v1/completions", json={"prompt": prompt})).json()
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "ok"), (1, "ok")]
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["completion_tokens"] == 4
    assert {request.tokens for request in server.driver.requests} == {(97,), (98, 99)}
    got = await events(server.client, "/v1/completions", {"prompt": ["a", "bc"]})
    texts = {0: "", 1: ""}
    for chunk in got[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == {0: "ok", 1: "ok"}
    assert len({request.id for request in server.driver.requests}) == 6


async def test_a_completion_has_sixteen_tokens_by_default_and_chat_the_whole_context(given: Start) -> None:
    server = await given(LENGTH)
    await server.client.post("/v1/completions", json={"prompt": "x"})
    await server.client.post("/v1/completions", json={"prompt": [1] * 250})
    await server.client.post("/v1/chat/completions", json=CHAT)
    await server.client.post("/v1/chat/completions", json=CHAT | {"max_tokens": 7, "max_completion_tokens": 5})
    assert [request.max_tokens for request in server.driver.requests] == [
        16,
        6,
        256 - len(server.driver.requests[2].tokens),
        5,
    ]


async def test_chat_logprobs_have_one_entry_per_token_with_its_bytes(given: Start) -> None:
    server = await given("é".encode(), b"x", END, Finish("stop", 0))
    body = CHAT | {"logprobs": True, "top_logprobs": 2}
    whole = (await server.client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    content = whole["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["bytes:\\xc3", "bytes:\\xa9", "x", "<|end|>"]
    assert [entry["bytes"] for entry in content[:3]] == [[0xC3], [0xA9], [0x78]]
    assert [top["token"] for top in content[2]["top_logprobs"]] == ["x", "bytes:\\xf0"]
    assert all(entry["logprob"] == -0.5 for entry in content)
    chunks = (await events(server.client, "/v1/chat/completions", body))[:-1]
    streamed = [e for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert streamed == content


async def test_completion_logprobs_have_tokens_offsets_and_alternatives(given: Start) -> None:
    server = await given("aé!".encode(), LENGTH)
    answer = (await server.client.post("/v1/completions", json={"prompt": "x", "logprobs": 2})).json()
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "!"],
        "token_logprobs": [-0.5] * 4,
        "top_logprobs": [
            {"a": -0.5, "bytes:\\xf0": -2.0},
            {"bytes:\\xc3": -0.5, "bytes:\\xf0": -2.0},
            {"bytes:\\xa9": -0.5, "bytes:\\xf0": -2.0},
            {"!": -0.5, "bytes:\\xf0": -2.0},
        ],
        "text_offset": [0, 1, 1, 2],
    }


async def test_token_ids_are_given_on_request(given: Start) -> None:
    server = await given(b"abc", END, Finish("stop", 0))
    body = {"prompt": "x", "return_token_ids": True}
    answer = (await server.client.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["token_ids"] == [97, 98, 99, END]
    chunks = (await events(server.client, "/v1/completions", body))[:-1]
    assert [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])] == [97, 98, 99, END]


async def test_a_stop_string_ends_the_answer_and_the_session(given: Start) -> None:
    never = asyncio.Event()
    server = await given(b"one\n", b"\ntwo", never)
    answer = (await server.client.post("/v1/completions", json={"prompt": "x", "stop": "\n\n"})).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("one", "stop")
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == server.driver.cached
    got = await events(server.client, "/v1/completions", {"prompt": "x", "stop": ["zzz", "\n\n"]})
    assert got[-2]["choices"][0]["finish_reason"] == "stop"
    assert "".join(chunk["choices"][0]["text"] for chunk in got[:-1]) == "one"
    assert (server.driver.sessions, len(server.driver.closed)) == (0, 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (WorkerLost("main/0 died"), 502, "worker-lost"),
        (NoRoute("no main worker is ready"), 503, "no-route"),
        (CapacityError("the queue is full"), 429, "capacity"),
        (ValueError("a secret of ours"), 500, "internal_error"),
    ],
)
async def test_an_error_before_the_first_token_has_its_status(
    given: Start, stream: bool, error: Exception, status: int, code: str
) -> None:
    server = await given(error)
    response = await server.client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert ("retry-after" in response.headers) == (status in (429, 503))
    assert response.headers["x-pdd-request-id"].startswith("req-")
    assert "secret" not in response.text


async def test_an_error_in_a_stream_is_its_last_event_and_no_done_follows(given: Start) -> None:
    server = await given(b"abc", asyncio.Event(), LENGTH)
    server.driver.script = (b"abc", WorkerLost("main/0 died"))
    got = await events(server.client, "/v1/completions", {"prompt": "x"})
    assert [chunk["choices"][0]["text"] for chunk in got[:-1]] == ["abc"]
    assert got[-1]["error"]["code"] == "worker-lost"
    assert "main/0 died" in got[-1]["error"]["message"]


async def test_a_whole_answer_that_fails_midway_is_an_error_and_no_text(given: Start) -> None:
    server = await given(b"abc", WorkerLost("main/0 died"))
    response = await server.client.post("/v1/completions", json={"prompt": "x"})
    assert response.status_code == 502
    assert "choices" not in response.json()


async def test_a_session_that_ends_without_an_end_is_an_error(given: Start) -> None:
    server = await given(b"abc")
    got = await events(server.client, "/v1/completions", {"prompt": "x"})
    assert "error" in got[-1]


async def test_one_failed_prompt_of_a_batch_fails_the_request(given: Start) -> None:
    server = await given(b"abc", WorkerLost("gone"))
    assert (await server.client.post("/v1/completions", json={"prompt": ["a", "b"]})).status_code == 502
    assert server.driver.sessions == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "says"),
    [
        ("chat/completions", CHAT | {"model": "gpt-9"}, 404, "model", "'given'"),
        ("completions", {"prompt": "x", "model": "gpt-9"}, 404, "model", "'given'"),
        ("completions", {"prompt": ""}, 400, "prompt", "empty"),
        ("completions", {"prompt": [5, 258]}, 400, "prompt", "no token 258"),
        ("completions", {"prompt": [1] * 256}, 400, "prompt", "256 tokens"),
        ("completions", {"prompt": [1] * 200, "max_tokens": 57}, 400, "max_tokens", "at most 56"),
        ("completions", {"prompt": "x", "best_of": 2}, 400, "best_of", "not supported"),
        ("completions", {"prompt": "x", "logit_bias": {"258": 1}}, 400, "logit_bias", "no token 258"),
        ("completions", {"prompt": "x", "stop_token_ids": [999]}, 400, "stop_token_ids", "no token 999"),
        ("completions", {"prompt": "x", "min_tokens": 17}, 400, "min_tokens", "16"),
        ("chat/completions", CHAT | {"max_completion_tokens": 999}, 400, "max_completion_tokens", "256"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 300}]}, 400, "messages", "256"),
    ],
)
async def test_a_request_that_does_not_fit_the_model_says_so(
    given: Start, path: str, body: dict[str, Any], status: int, param: str, says: str
) -> None:
    server = await given(LENGTH)
    response = await server.client.post(f"/v1/{path}", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)
    assert says in response.json()["error"]["message"]
    assert "x-pdd-request-id" in response.headers
    assert server.driver.requests == []


async def test_a_context_too_long_names_both_numbers(given: Start) -> None:
    server = await given(LENGTH)
    error = (await server.client.post("/v1/completions", json={"prompt": [1] * 300, "max_tokens": 9})).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "300" in error["message"]
    assert "256" in error["message"]


async def test_a_worker_with_a_shorter_context_bounds_all_requests_while_it_is_there(given: Start) -> None:
    server = await given(LENGTH)

    async def asked(context: int) -> int:
        server.driver._info = msgspec.structs.replace(server.driver._info, context_length=context)
        return (await server.client.post("/v1/completions", json={"prompt": [1] * 30, "max_tokens": 9})).status_code

    assert [await asked(context) for context in (256, 38, 39)] == [200, 400, 200]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
    ],
)
async def test_what_no_worker_can_do_is_a_400_that_names_the_field(
    given: Start, body: dict[str, Any], param: str
) -> None:
    server = await given(LENGTH, able=False, context=2048)
    for stream in (False, True):
        response = await server.client.post("/v1/chat/completions", json=CHAT | body | {"stream": stream})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(("where", "param"), [("regex", "guided_regex"), ("request req-1", None), ("", None)])
async def test_what_an_engine_refuses_names_the_field_of_the_request(given: Start, where: str, param: str) -> None:
    server = await given(RequestError("this cannot be used", where=where))
    response = await server.client.post("/v1/completions", json={"prompt": "x", "guided_regex": "("})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_body_over_the_limit_is_refused(given: Start) -> None:
    server = await given(LENGTH)
    body = json.dumps({"prompt": "x" * MAX_BODY}).encode()
    assert (await server.client.post("/v1/completions", content=body)).status_code == 413

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 2**20):
            yield body[at : at + 2**20]

    assert (await server.client.post("/v1/completions", content=pieces())).status_code == 413


async def test_unknown_paths_and_methods_answer_in_openais_form(given: Start) -> None:
    server = await given(LENGTH)
    for response, status in (
        (await server.client.get("/v1/nothing"), 404),
        (await server.client.get("/v1/completions"), 405),
        (await server.client.get("/pdd/requests/req-0"), 404),
        (await server.client.get("/v1/models/gpt-9"), 404),
    ):
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert "x-pdd-request-id" in response.headers


async def test_while_there_is_no_route_requests_are_told_to_come_back(given: Start) -> None:
    server = await given(b"a", LENGTH)
    server.driver.ready, server.driver.why_not_ready = False, "no main worker is ready"
    for response in (
        await server.client.get("/ready"),
        await server.client.get("/v1/models"),
        await server.client.post("/v1/completions", json={"prompt": "x"}),
    ):
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert "no main worker is ready" in response.json()["error"]["message"]
    assert (await server.client.get("/health")).status_code == 200
    server.driver.ready = True
    assert (await server.client.get("/ready")).status_code == 200
    assert (await server.client.get("/v1/models")).json()["data"][0]["id"] == "given"


async def test_what_ended_is_listed_and_counted(given: Start) -> None:
    server = await given(b"abc", LENGTH)
    ids = [(await server.client.post("/v1/completions", json={"prompt": "x"})).headers["x-pdd-request-id"]]
    ids.append((await server.client.post("/v1/completions", json={"prompt": ""})).headers["x-pdd-request-id"])
    recent = (await server.client.get("/pdd/requests")).json()["requests"]
    assert [(entry["id"], entry["status"], entry["tokens"]) for entry in recent] == [(ids[1], 400, 0), (ids[0], 200, 3)]
    metrics = await server.client.get("/metrics")
    assert 'pdd_requests_total{route="none",status="400"} 1.0' in metrics.text
    assert "pdd_ttft_seconds_count" in metrics.text
    assert metrics.headers["content-type"].startswith("text/plain")


async def test_a_stop_lets_answers_end_and_ends_those_that_do_not(given: Start) -> None:
    gate, never = asyncio.Event(), asyncio.Event()
    server = await given(b"a", gate, b"b", LENGTH)
    ends = asyncio.create_task(events(server.client, "/v1/completions", {"prompt": "x"}))
    await until(lambda: server.driver.sessions == 1)
    server.driver.script = (b"a", never)
    hangs = asyncio.create_task(events(server.client, "/v1/completions", {"prompt": "x"}))
    await until(lambda: server.driver.sessions == 2)
    stopping = asyncio.create_task(server.service.stop(3.0))
    await asyncio.sleep(0)
    ready = await server.client.get("/ready")
    assert (ready.status_code, "stopping" in ready.text) == (503, True)
    gate.set()
    assert (await ends)[-1] == "[DONE]"
    await stopping
    assert (await hangs)[-1]["error"]["code"] == "cancelled"
    assert server.driver.sessions == 0
    refused = await server.client.post("/v1/completions", json={"prompt": "x"})
    assert (refused.status_code, "stopping" in refused.text) == (503, True)


async def test_the_tokenizer_is_given_to_who_makes_prompts(given: Start) -> None:
    server = await given()
    files = byte_tokenizer()
    whole = await server.client.get("/pdd/tokenizer/tokenizer.json")
    assert whole.headers["content-type"] == "application/json"
    assert whole.text == files.tokenizer_json
    config = (await server.client.get("/pdd/tokenizer/tokenizer_config.json")).json()
    assert config["chat_template"] == files.chat_template
    assert config["eos_token"] == files.special_tokens["eos_token"]
    server.driver.why_not_ready, server.driver.ready = "no worker", False
    assert (await server.client.get("/pdd/tokenizer/tokenizer.json")).status_code == 503
