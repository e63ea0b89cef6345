"""Every answer in OpenAI's published shapes, as the types of its own client check them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from pdd_runtime.pipeline import Finish
from pdd_runtime.testing.byte_tokenizer import END

Start = Callable[..., Awaitable[Any]]
CHAT: dict[str, Any] = {"model": "given", "messages": [{"role": "user", "content": "hi"}]}
TEXT: dict[str, Any] = {"model": "given", "prompt": "hi"}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
STOP = Finish("stop", 1)
CALL = b'Well. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
THINKS = "<think>{{ tools or '' }}{{ messages }}{% if false %}</think>{% endif %}"

KINDS: list[tuple[str, dict[str, Any], bytes]] = [
    ("plain", {}, "né 🎉".encode()),
    ("logprobs", {"logprobs": True, "top_logprobs": 2}, "né".encode()),
    ("choices", {"n": 3}, b"ab"),
    ("tools", TOOLS, CALL),
    ("tools and logprobs", TOOLS | {"logprobs": True}, CALL),
    ("required", TOOLS | {"tool_choice": "required"}, b'[{"name":"f","arguments":{}}]'),
    ("named", TOOLS | {"tool_choice": {"type": "function", "function": {"name": "f"}}}, b'{"a":1}'),
    ("json", {"response_format": {"type": "json_object"}}, b'{"a": 1}'),
    ("token ids", {"extra_body": {"return_token_ids": True}}, b"ab"),
    ("stop", {"stop": ["b"]}, b"ab"),
]


def strictly(model: type[BaseModel], got: BaseModel) -> None:
    """What the client read loosely is what the shape says, to the last type and required field."""
    model.model_validate_json(got.to_json(), strict=True)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("change", "made"), [kind[1:] for kind in KINDS], ids=[kind[0] for kind in KINDS])
@pytest.mark.parametrize("template", [None, THINKS], ids=["plain", "thinks"])
async def test_chat_answers_are_what_the_openai_client_expects(
    given: Start, change: dict[str, Any], made: bytes, template: str | None
) -> None:
    server = await given(b"</think>" * bool(template) + made, END, STOP, context=4096, template=template)
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(**(CHAT | change))
        strictly(ChatCompletion, whole)
        stream = await client.chat.completions.create(
            **(CHAT | change), stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        strictly(ChatCompletionChunk, chunk)
    assert chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    for choice in whole.choices:
        last = [c for chunk in chunks for c in chunk.choices if c.index == choice.index][-1]
        assert last.finish_reason == choice.finish_reason
        calls = choice.message.tool_calls or []
        assert (choice.finish_reason == "tool_calls") == bool(calls)
        for call in calls:
            assert call.type == "function"
            assert call.function.name == "f"


@pytest.mark.parametrize(
    "change", [{}, {"logprobs": 2}, {"n": 2}, {"prompt": ["a", "b"]}, {"echo": True}, {"stop": "b"}], ids=str
)
async def test_completions_are_what_the_openai_client_expects(given: Start, change: dict[str, Any]) -> None:
    server = await given(b"abc", END, STOP)
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.completions.create(**(TEXT | change))
        strictly(Completion, whole)
        stream = await client.completions.create(**(TEXT | change), stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].usage == whole.usage
    for choice in whole.choices:
        said = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in said) == choice.text
        assert said[-1].finish_reason == choice.finish_reason


async def test_the_openai_clients_own_parsing_of_tools_and_forms_works(given: Start) -> None:
    class City(BaseModel):
        name: str
        people: int

    server = await given(b'{"name":"Rome","people":3}', END, STOP)
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        parsed = await client.chat.completions.parse(**CHAT, response_format=City)
        assert parsed.choices[0].message.parsed == City(name="Rome", people=3)
        async with client.chat.completions.stream(**CHAT, response_format=City) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert final.choices[0].message.parsed == City(name="Rome", people=3)

    server = await given(b'<tool_call>{"name": "city", "arguments": {"name": "Rome", "people": 3}}', STOP, context=4096)
    tools = [pydantic_function_tool(City, name="city")]
    async with (
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(**CHAT, tools=tools) as stream,
    ):
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= set(kinds)
    (call,) = final.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == City(name="Rome", people=3)
