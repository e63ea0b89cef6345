"""Chat answers that are more than text, whole and streamed; what the sessions make is given."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from pdd_runtime.frontend.language import Language
from pdd_runtime.frontend.requests import seed_of
from pdd_runtime.pipeline import Finish
from pdd_runtime.testing.byte_tokenizer import END

Start = Callable[..., Awaitable[Any]]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere.",
        "parameters": {"type": "object", "properties": {"in": {"$ref": "#/$defs/Place"}}, "$defs": {"Place": {}}},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = {"tools": [WEATHER, NOW]}
CALLS = 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"in": "Köln"}}\n</tool_call>\n'
STOP = Finish("stop", 0)
KNOWS_TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}<tool_call>{% endfor %}{% for m in messages %}[{{ m.role }}:"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}]{% endfor %}"
)
THINKS = (
    "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)


async def streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The messages that a client puts together, and their finish reasons, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line or line == "data: [DONE]":
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                whole = choices.setdefault(choice["index"], {"content": "", "tool_calls": [], "logprobs": []})
                delta = choice["delta"]
                whole["content"] += delta.get("content") or ""
                if "reasoning_content" in delta:
                    whole["reasoning_content"] = whole.get("reasoning_content", "") + delta["reasoning_content"]
                for call in delta.get("tool_calls", []):
                    if call["index"] == len(whole["tool_calls"]):
                        whole["tool_calls"].append({k: v for k, v in call.items() if k != "index"})
                    else:
                        whole["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
                whole["logprobs"] += (choice["logprobs"] or {}).get("content") or []
                whole["finish_reason"] = choice["finish_reason"]
    return choices


async def both(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """The one choice, which must be the same in both ways."""
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    got = (await streamed(client, body))[0]
    message = choice["message"]
    assert got["content"] == (message["content"] or "")
    assert got.get("reasoning_content") == message.get("reasoning_content")
    assert got["finish_reason"] == choice["finish_reason"]
    calls = [call["function"] for call in message.get("tool_calls", [])]
    assert [call["function"] for call in got["tool_calls"]] == calls
    assert got["logprobs"] == ((choice["logprobs"] or {}).get("content") or [])
    return dict(message) | {"finish_reason": choice["finish_reason"], "logprobs": got["logprobs"]}


async def test_calls_of_tools_are_no_text(given: Start) -> None:
    server = await given(CALLS.encode(), END, STOP, context=2048)
    got = await both(server.client, CHAT | TOOLS | {"logprobs": True})
    assert (got["content"], got["finish_reason"]) == ("I look.", "tool_calls")
    assert [call["function"] for call in got["tool_calls"]] == [{"name": "weather", "arguments": '{"in": "Köln"}'}]
    assert got["tool_calls"][0]["type"] == "function"
    # The tokens of the calls have their logprobs like all others.
    assert len(got["logprobs"]) == len(CALLS.encode()) + 1
    sampling = server.driver.requests[0].sampling
    assert sampling.guide is None


async def test_every_call_has_an_id_of_its_own(given: Start) -> None:
    server = await given(CALLS.encode() * 2, STOP, context=2048)
    choices = await streamed(server.client, CHAT | TOOLS | {"n": 2})
    ids = [call["id"] for choice in choices.values() for call in choice["tool_calls"]]
    assert len(set(ids)) == 4


async def test_an_answer_cut_off_in_a_call_says_length(given: Start) -> None:
    server = await given(CALLS[:60].encode(), Finish("length", 0), context=2048)
    got = await both(server.client, CHAT | TOOLS)
    assert (got["finish_reason"], got["tool_calls"][0]["function"]["name"]) == ("length", "weather")


@pytest.mark.parametrize("choice", ["none", None])
async def test_without_tools_their_form_is_text(given: Start, choice: str | None) -> None:
    server = await given(CALLS.encode(), STOP, context=2048)
    got = await both(server.client, CHAT | ({} if choice is None else TOOLS | {"tool_choice": choice}))
    assert (got["content"], got["finish_reason"]) == (CALLS, "stop")
    assert b"weather" not in bytes(id for id in server.driver.requests[0].tokens if id < 256)


async def test_a_required_call_is_guided_and_read_back(given: Start) -> None:
    made = b'[{"name":"now","arguments":{}}]'
    server = await given(made, END, STOP, context=2048)
    got = await both(server.client, CHAT | TOOLS | {"tool_choice": "required", "parallel_tool_calls": False})
    assert (got["content"], got["finish_reason"]) == (None, "tool_calls")
    assert [call["function"] for call in got["tool_calls"]] == [{"name": "now", "arguments": "{}"}]
    guide = server.driver.requests[0].sampling.guide
    schema = json.loads(guide.text)
    assert (guide.kind, schema["minItems"], schema["maxItems"]) == ("json_schema", 1, 1)
    weather, now = schema["items"]["anyOf"]
    assert (weather["properties"]["name"], now["properties"]["name"]) == ({"const": "weather"}, {"const": "now"})
    # Definitions are found from the root, under names that do not clash.
    assert weather["properties"]["arguments"]["properties"]["in"] == {"$ref": "#/$defs/weather.Place"}
    assert schema["$defs"] == {"weather.Place": {}}


async def test_a_named_call_is_its_arguments_alone(given: Start) -> None:
    server = await given(b'{"in":"Rome"}', END, STOP, context=2048)
    use = {"type": "function", "function": {"name": "weather"}}
    got = await both(server.client, CHAT | TOOLS | {"tool_choice": use})
    assert [call["function"] for call in got["tool_calls"]] == [{"name": "weather", "arguments": '{"in":"Rome"}'}]
    assert json.loads(server.driver.requests[0].sampling.guide.text) == WEATHER["function"]["parameters"]  # type: ignore[index]


FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}}


@pytest.mark.parametrize(
    ("template", "made", "rule"),
    [
        ("hi", b'<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', '"<tool_call>" "\\n" call'),
        ("{{ tools }}<|python_tag|>", b'{"name": "now", "parameters": {}}', "answer | call"),
        ("{{ tools }}[TOOL_CALLS]", b'[TOOL_CALLS][{"name": "now", "arguments": {}}]', '"[TOOL_CALLS]" " "? call'),
    ],
)
async def test_a_form_and_tools_make_an_answer_of_the_form_or_calls(
    given: Start, template: str, made: bytes, rule: str
) -> None:
    server = await given(made, END, STOP, template=template, context=4096)
    got = await both(server.client, CHAT | TOOLS | FORM)
    assert [call["function"] for call in got["tool_calls"]] == [{"name": "now", "arguments": "{}"}]
    assert (got["content"], got["finish_reason"]) == (None, "tool_calls")
    guide = server.driver.requests[0].sampling.guide
    assert guide.kind == "grammar"
    assert rule in guide.text.splitlines()[0]
    answers = await given(b'{"a": "<b>"}', END, STOP, template=template, context=4096)
    got = await both(answers.client, CHAT | TOOLS | FORM)
    assert (got["content"], got["finish_reason"], "tool_calls" in got) == ('{"a": "<b>"}', "stop", False)
    # Where a call is forced there is nothing left for the form.
    await answers.client.post("/v1/chat/completions", json=CHAT | TOOLS | FORM | {"tool_choice": "required"})
    assert json.loads(answers.driver.requests[-1].sampling.guide.text)["type"] == "array"


async def test_calls_that_no_schema_describes_do_not_go_with_a_form(given: Start) -> None:
    server = await given(STOP, template="{{ tools }}<tool_call><function=", context=4096)
    response = await server.client.post("/v1/chat/completions", json=CHAT | TOOLS | FORM)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_format")


async def test_a_call_has_an_id_that_the_models_own_template_takes_back(given: Start) -> None:
    server = await given(b"[TOOL_CALLS]now[ARGS]{}", STOP, template="{{ tools }}[TOOL_CALLS]", context=2048)
    assert [len(call["id"]) for call in (await both(server.client, CHAT | TOOLS))["tool_calls"]] == [9]


def prompt(server: Any) -> str:
    return bytes(id for id in server.driver.requests[-1].tokens if id < 256).decode()


HISTORY = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"in": "Köln"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
}


async def test_a_template_that_knows_tools_gets_them(given: Start) -> None:
    server = await given(b"ok", STOP, template=KNOWS_TOOLS, context=2048)
    await both(server.client, HISTORY | TOOLS)
    said = prompt(server)
    assert said.startswith(json.dumps(WEATHER))
    assert said.endswith('[system:Be brief.][user:Weather?][assistant:None{"in": "Köln"}][tool:rain]')


async def test_a_template_that_knows_no_tools_is_told_in_the_systems_words(given: Start) -> None:
    server = await given(b"ok", STOP, context=4096)
    await both(server.client, HISTORY | TOOLS)
    said = prompt(server)
    assert said.startswith("system\nBe brief.\n\nYou can call functions")
    assert json.dumps(WEATHER["function"]) in said
    assert 'assistant\n<tool_call>\n{"name": "weather", "arguments": {"in": "Köln"}}\n</tool_call>' in said
    assert "user\n<tool_response>\nrain\n</tool_response>" in said


async def test_reasoning_is_split_off_where_the_model_has_it(given: Start) -> None:
    made = b"<think>\nHm.\n</think>\n\nYes."
    server = await given(made, STOP, template=THINKS)
    got = await both(server.client, CHAT)
    assert (got["reasoning_content"], got["content"]) == ("Hm.", "Yes.")
    got = await both(server.client, CHAT | {"chat_template_kwargs": {"enable_thinking": False}})
    assert ("reasoning_content" in got, got["content"]) == (False, made.decode())
    assert prompt(server).endswith("</think>\n\n")
    plain = await given(made, STOP)
    assert (await both(plain.client, CHAT))["content"] == made.decode()


async def test_reasoning_that_the_template_opens_goes_on_until_it_is_closed(given: Start) -> None:
    server = await given(b"Hm.</think>Yes.", STOP, template="{{ messages[0].content }}<think>\n")
    got = await both(server.client, CHAT)
    assert (got["reasoning_content"], got["content"]) == ("Hm.", "Yes.")


async def test_an_answer_of_a_given_form_has_no_reasoning(given: Start) -> None:
    server = await given(b"ja", STOP, template=THINKS)
    assert (await both(server.client, CHAT | {"guided_choice": ["ja", "nein"]}))["content"] == "ja"
    assert prompt(server).endswith("<think>\n\n</think>\n\n")
    opened = await given(b"ja", STOP, template="{{ messages[0].content }}<think>\n")
    assert (await both(opened.client, CHAT | {"guided_choice": ["ja", "nein"]}))["content"] == "ja"
    assert prompt(opened).endswith("<think>\n\n</think>\n\n")


async def test_every_choice_has_a_seed_and_the_prompt_counts_once(given: Start) -> None:
    server = await given(b"ab", Finish("length", 3))
    answer = (await server.client.post("/v1/chat/completions", json=CHAT | {"n": 3, "seed": 5})).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    requests = server.driver.requests
    assert [request.sampling.seed for request in requests] == [seed_of(5, 0), seed_of(5, 1), seed_of(5, 2)]
    assert requests[0].sampling.seed == 5
    assert len({request.sampling.seed for request in requests}) == len({request.id for request in requests}) == 3
    assert len({request.tokens for request in requests}) == 1
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(requests[0].tokens), 6)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_a_stop_token_is_not_part_of_the_text_and_min_tokens_delays_a_stop_text(given: Start) -> None:
    server = await given(b"a.b.", STOP)
    got = await both(server.client, CHAT | {"stop": ".", "min_tokens": 2})
    assert (got["content"], got["finish_reason"]) == ("a.b", "stop")
    got = await both(server.client, CHAT | {"stop_token_ids": [ord(".")]})
    assert got["content"] == "ab"
    assert server.driver.requests[-1].sampling.stop_token_ids == (END, ord("."))
    await both(server.client, CHAT | {"stop_token_ids": [7], "ignore_eos": True})
    assert server.driver.requests[-1].sampling.stop_token_ids == (7,)


@pytest.mark.parametrize(
    ("template", "style"),
    [
        ("{{ messages }}", "hermes"),
        ("{{ tools }}<|python_tag|>", "llama"),
        ("{{ tools }}<tool_call>", "hermes"),
        ("{{ tools }}<tool_call><function=", "qwen-coder"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "hermes"),
    ],
)
async def test_the_way_a_model_writes_calls_is_seen_from_its_template(given: Start, template: str, style: str) -> None:
    server = await given(STOP, template=template)
    assert Language(await server.driver.tokenizer()).call_style == style
