"""Calls of tools and reasoning are found in the text, wherever it is cut."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd_runtime.frontend.calls import LIST_BETWEEN, ArgumentsOnly, BareCalls, TaggedCalls, reader_for
from pdd_runtime.frontend.reading import Part, Plain, Reader, joined
from pdd_runtime.frontend.reasoning import Thinking, begins_inside

Kinds = list[tuple[str, str]]
NAMES = ("weather", "now")
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {"properties": {"in": {"type": "string"}, "days": {"type": "integer"}, "how": {"$ref": "#/x"}}},
    "now": {},
}


def tagged() -> Reader:
    return reader_for("hermes", SCHEMAS)


def functions() -> Reader:
    return reader_for("qwen-coder", SCHEMAS)


def llama() -> Reader:
    return reader_for("llama", SCHEMAS)


def mistral() -> Reader:
    return reader_for("mistral", SCHEMAS)


def forced() -> Reader:
    return BareCalls(NAMES, LIST_BETWEEN)


def thinking() -> Reader:
    return Thinking(TaggedCalls(), inside=False)


def opened() -> Reader:
    return Thinking(Plain(), inside=True)


def read(reader: Reader, pieces: list[str]) -> list[Part]:
    parts = [part for piece in pieces for part in reader.push(piece)]
    return joined([*parts, *reader.flush()])


FUNCTION = "<tool_call>\n<function=weather>\n<parameter=in>\n{}\n</parameter>\n"
CASES: list[tuple[Callable[[], Reader], str, Kinds]] = [
    (
        functions,
        "I look.\n"
        + FUNCTION.format("1 <b>\n")
        + "<parameter=days>\n3\n</parameter>\n<parameter=how>\n[1]\n</parameter>\n</function>\n</tool_call>\n"
        + "<tool_call><function=now></function></tool_call>",
        [
            ("content", "I look."),
            ("call", "weather"),
            ("arguments", '{"in": "1 <b>\\n", "days": 3, "how": [1]}'),
            ("call", "now"),
            ("arguments", "{}"),
        ],
    ),
    (
        functions,
        FUNCTION.format("Rome") + "<parameter=days>soon</parameter></function>",
        [("call", "weather"), ("arguments", '{"in": "Rome", "days": "soon"}')],
    ),
    # Cut off, and broken: what was whole has gone out.
    (functions, FUNCTION.format("Rome") + "<parameter=days>3", [("call", "weather"), ("arguments", '{"in": "Rome"')]),
    (
        functions,
        FUNCTION.format("Rome") + "so</tool_call>x",
        [("call", "weather"), ("arguments", '{"in": "Rome"'), ("content", "x")],
    ),
    (functions, '<tool_call>{"name": "now"}</tool_call>', [("content", '<tool_call>{"name": "now"}</tool_call>')]),
    (
        mistral,
        'I look. [TOOL_CALLS] [{"name": "weather", "arguments": {"in": "Köln"}, "id": "abc"}, {"name": "now"}]',
        [
            ("content", "I look."),
            ("call", "weather"),
            ("arguments", '{"in": "Köln"}'),
            ("call", "now"),
            ("arguments", "{}"),
        ],
    ),
    (
        mistral,
        '[TOOL_CALLS]weather[ARGS]{"in": "[x] }"} [TOOL_CALLS]now[CALL_ID]c1[ARGS]{}',
        [("call", "weather"), ("arguments", '{"in": "[x] }"}'), ("call", "now"), ("arguments", "{}")],
    ),
    (mistral, "[TOOL_CALLS] what", [("content", "[TOOL_CALLS] what")]),
    (mistral, "[1] is [TOOL", [("content", "[1] is [TOOL")]),
    (tagged, "no call, <b>only</b> text ", [("content", "no call, <b>only</b> text ")]),
    (
        tagged,
        'I look.\n<tool_call>\n{"name": "weather", "arguments": {"in": "Köln 🎉", "n": [1, {"a": "}"}]}}\n</tool_call>',
        [("content", "I look."), ("call", "weather"), ("arguments", '{"in": "Köln 🎉", "n": [1, {"a": "}"}]}')],
    ),
    (
        tagged,
        '<tool_call>{"name": "now"}</tool_call>\n<tool_call>{"arguments": {"a": "\\"{"}, "name": "b"}</tool_call>\n',
        [("call", "now"), ("arguments", "{}"), ("call", "b"), ("arguments", '{"a": "\\"{"}')],
    ),
    (
        tagged,
        '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call> after',
        [("call", "now"), ("arguments", '{"a": 1}'), ("content", " after")],
    ),
    (
        tagged,
        '<tool_call>{"name": "now", "arguments": null}',
        [("call", "now"), ("arguments", "{}")],
    ),
    (tagged, "<tool_call>call me</tool_call>", [("content", "<tool_call>call me</tool_call>")]),
    (tagged, '<tool_call>\n{"name": 5}', [("content", '<tool_call>\n{"name": 5}')]),
    (tagged, '<tool_call>{"na', [("content", '<tool_call>{"na')]),
    (tagged, "a <tool", [("content", "a <tool")]),
    (
        tagged,
        '<tool_call>{"name": "now", "arguments": {"a": 1</tool_call>still here',
        [("call", "now"), ("arguments", '{"a": 1'), ("content", "still here")],
    ),
    (
        tagged,
        '<tool_call>{"name": "now", "arguments": {"a": "cut o',
        [("call", "now"), ("arguments", '{"a": "cut o')],
    ),
    (
        llama,
        '{"name": "weather", "parameters": {"in": "Rome"}}; {"name": "now", "parameters": {}}',
        [("call", "weather"), ("arguments", '{"in": "Rome"}'), ("call", "now"), ("arguments", "{}")],
    ),
    (
        llama,
        '<|python_tag|>{"type": "function", "name": "weather", "parameters": {"in": "Rome"}}',
        [("call", "weather"), ("arguments", '{"in": "Rome"}')],
    ),
    (llama, ' {"name": "Ada", "born": 1815}', [("content", ' {"name": "Ada", "born": 1815}')]),
    (llama, "{not json", [("content", "{not json")]),
    (llama, " <|python", [("content", " <|python")]),
    (llama, 'It is {"name": "now"}', [("content", 'It is {"name": "now"}')]),
    (
        forced,
        '[{"name":"weather","arguments":{"in":"a"}},\n{"name":"now","arguments":{}}]',
        [("call", "weather"), ("arguments", '{"in":"a"}'), ("call", "now"), ("arguments", "{}")],
    ),
    (lambda: ArgumentsOnly("f"), '{"a": 1}', [("call", "f"), ("arguments", '{"a": 1}')]),
    (
        thinking,
        '\n<think>\nHm, <tool_call>?\n\nYes. </think>\n\nSo: <tool_call>{"name": "now"}</tool_call>',
        [
            ("reasoning", "Hm, <tool_call>?\n\nYes."),
            ("content", "So:"),
            ("call", "now"),
            ("arguments", "{}"),
        ],
    ),
    (thinking, " <thin", [("content", " <thin")]),
    (thinking, "no <think>thought</think>", [("content", "no <think>thought</think>")]),
    (opened, "\nlet me see </thin", [("reasoning", "let me see </thin")]),
    (opened, "\na b \n</think>\n\n c ", [("reasoning", "a b"), ("content", "c ")]),
]


@pytest.mark.parametrize(("make", "text", "wanted"), CASES, ids=range(len(CASES)))
def test_a_text_means_the_same_cut_at_every_place_and_whole(
    make: Callable[[], Reader], text: str, wanted: Kinds
) -> None:
    assert read(make(), [text]) == wanted
    assert read(make(), list(text)) == wanted
    for at in range(1, len(text)):
        assert read(make(), [text[:at], text[at:]]) == wanted


SNIPPETS = [
    *("<tool_call>", "</tool_call>", '{"name": "now"', ', "arguments": {', '"a": "b"', "}", "}}", "{", '"', "\\", ","),
    *("<function=weather>", "</function>", "<parameter=in>", "</parameter>", "[TOOL_CALLS]", "now", "[ARGS]{}"),
    *("<think>", "</think>", "<|python_tag|>", ";", "x", "é🎉", "[", "]", "<", ":", " ", "\n"),
]


@settings(max_examples=400)
@given(
    snippets=st.lists(st.sampled_from(SNIPPETS), max_size=14),
    cuts=st.lists(st.integers(0, 120), max_size=8),
    make=st.sampled_from([tagged, functions, mistral, llama, forced, thinking, opened]),
)
def test_any_text_means_the_same_however_it_is_cut(
    snippets: list[str], cuts: list[int], make: Callable[[], Reader]
) -> None:
    text = "".join(snippets)
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(places)]
    assert read(make(), pieces) == read(make(), [text]) == read(make(), list(text))


def test_arguments_go_out_as_they_are_written() -> None:
    reader = TaggedCalls()
    seen = [reader.push(piece) for piece in ('<tool_call>{"name": "f", ', '"arguments": {"a": 1', ', "b"')]
    assert seen == [[("call", "f")], [("arguments", '{"a": 1')], [("arguments", ', "b"')]]


def test_the_prompts_end_says_whether_the_answer_begins_with_reasoning() -> None:
    assert begins_inside("<|assistant|>\n<think>\n") is True
    assert begins_inside("<|assistant|>\n") is False
    assert begins_inside("<|assistant|>\n<think>\n\n</think>\n\n") is None
