from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from pdd_runtime.errors import RequestError
from pdd_runtime.frontend.errors import answer_for, request_error
from pdd_runtime.frontend.requests import ChatRequest, CompletionRequest

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOLS = [{"type": "function", "function": {"name": "f"}}]
USE = {"type": "function", "function": {"name": "f"}}


def refused(model: type[ChatRequest] | type[CompletionRequest], body: Any) -> RequestError:
    text = body if isinstance(body, str) else json.dumps(body)
    try:
        model.model_validate_json(text)
    except ValidationError as invalid:
        return request_error(invalid)
    except RequestError as error:
        return error
    raise AssertionError(f"{body} was taken")


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"messages": None}, "messages", "array"),
        ({"messages": []}, "messages", "at least 1 item, not []"),
        ({"messages": [{"role": "user"}]}, "messages.0", "needs content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", "'king'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content", "string"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "'image_url'"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": "9"}, "max_tokens", "'9'"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "-1"),
        ({"temperature": 2.5}, "temperature", "2.5"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": -2}, "top_k", "-2"),
        ({"min_p": 1.5}, "min_p", "1.5"),
        ({"seed": 2**64}, "seed", "less than"),
        ({"stop": ""}, "stop", "not empty"),
        ({"stop": ["a", ""]}, "stop", "not empty"),
        ({"stop": list("abcde")}, "stop", "at most 4"),
        ({"stream": "yes"}, "stream", "'yes'"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "'stream': true"),
        ({"top_logprobs": 3}, "top_logprobs", "'logprobs': true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "21"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "129"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"echo": True}, "echo", "not supported"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"modalities": ["audio"]}, "modalities", "not supported"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "2.5"),
        ({"presence_penalty": -3}, "presence_penalty", "-3"),
        ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
        ({"min_tokens": -1}, "min_tokens", "-1"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "no token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": [5]}, "logit_bias", "object"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0", "-1"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "'a b'"),
        ({"tools": [*TOOLS, *TOOLS]}, "tools", "several tools"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "'required'"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice", "function"),
        ({"tools": TOOLS, "tool_choice": USE | {"function": {"name": "g"}}}, "tool_choice", "the tools are f"),
        ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex", "can be given no regex, only a JSON Schema"),
        ({"tools": TOOLS, "tool_choice": USE, "guided_regex": "a"}, "guided_regex", "one form"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs"),
        ({"guided_json": "{"}, "guided_json", "JSON Schema"),
        ({"guided_json": 5}, "guided_json", "JSON Schema"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_regex": ""}, "guided_regex", "at least 1"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "only one form"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "only one form"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", "not permitted"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "form"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
        ({"strict": True, "colour": 1, "stream": True, "stream_options": {"x": 1}}, "colour", "stream_options.x"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], field: str, says: str) -> None:
    error = refused(ChatRequest, CHAT | change)
    answered = answer_for(error)
    assert answered.status == 400
    assert answered.error["param"] == field
    assert answered.error["type"] == "invalid_request_error"
    assert says in str(answered.error["message"])


@pytest.mark.parametrize(
    "prompt", [None, [], 5, [1, "a"], [[1], "a"], [[]], [-1], [1.5], [True], {"a": 1}, ["a"] * 129]
)
def test_a_wrong_prompt_is_named(prompt: Any) -> None:
    assert refused(CompletionRequest, {"prompt": prompt}).where == "prompt"


def test_several_wrong_fields_are_counted() -> None:
    assert "(and 2 more wrong fields)" in refused(ChatRequest, {"temperature": 9, "top_p": 9}).what


@pytest.mark.parametrize("body", ["", "{", "[1]", "null", '{"messages": [{"role": "user", "content": "\\ud800"}]}'])
def test_what_is_no_json_object_says_so(body: str) -> None:
    assert "JSON" in refused(ChatRequest, body).what


def test_missing_fields_are_named() -> None:
    assert refused(ChatRequest, {}).where == "messages"
    assert "required" in refused(CompletionRequest, {}).what


def test_nulls_and_unknown_fields_change_nothing() -> None:
    nulls = dict.fromkeys(("temperature", "top_p", "n", "stop", "stream", "tools", "logprobs", "max_tokens", "seed"))
    asked = ChatRequest.model_validate_json(json.dumps(CHAT | nulls | {"user": "me", "metadata": {"a": 1}, "n": 1}))
    sampling = asked.sampling((7,), None)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 1.0, 0, 0.0)
    assert sampling.stop_token_ids == (7,)


def test_what_is_asked_reaches_the_engine() -> None:
    body = CHAT | {"temperature": 0, "top_p": 0.5, "top_k": 40, "min_p": 0.1, "seed": -1, "ignore_eos": True}
    sampling = ChatRequest.model_validate_json(json.dumps(body)).sampling((7,), 2)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 40, 0.1)
    assert (sampling.seed, sampling.logprobs, sampling.stop_token_ids) == (2**64 - 1, 2, ())


def test_without_a_seed_two_requests_differ() -> None:
    asked = ChatRequest.model_validate(CHAT)
    assert asked.sampling((), None).seed != asked.sampling((), None).seed


@pytest.mark.parametrize(
    ("prompt", "meant"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        ("", ("",)),
    ],
)
def test_every_form_of_prompt_is_understood(prompt: Any, meant: Any) -> None:
    assert CompletionRequest.model_validate_json(json.dumps({"prompt": prompt})).prompt == meant


def test_text_parts_are_one_text_and_other_keys_reach_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": parts, "name": "me"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
    ]
    asked = ChatRequest.model_validate_json(json.dumps({"messages": messages}))
    assert [message.for_template() for message in asked.messages] == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "a\nb", "name": "me"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
    ]
