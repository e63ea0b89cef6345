from __future__ import annotations

import json
import re

import pytest
from msgspec import structs

from pdd_runtime.errors import EngineError, RequestError
from pdd_runtime.inprocess import guides as module
from pdd_runtime.inprocess.guides import Guides, GuideState
from pdd_runtime.plugins.engine import Guide
from pdd_runtime.testing.byte_tokenizer import END, SIZE, byte_tokenizer

DIGITS = Guide(kind="regex", text="[0-9]{2,3}")


@pytest.fixture
def guides() -> Guides:
    return Guides(byte_tokenizer(), SIZE)


def allowed(state: GuideState) -> set[int]:
    mask = state.mask()
    return {token for token in range(SIZE) if mask[token >> 3] >> (token & 7) & 1}


def takes(guides: Guides, guide: Guide, text: str) -> bool:
    """Whether `text` is a whole output of this form."""
    try:
        return END in allowed(guides.follow(guide, text.encode(), ()))
    except EngineError:
        return False


def test_a_state_that_follows_an_output_is_the_one_that_made_it(guides: Guides) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}}
    guide = Guide(kind="json_schema", text=json.dumps(schema))
    output = b'{"a": [1, 22, {}'[:-2] + b"3]}"
    living = guides.follow(guide, (), ())
    for known in range(len(output) + 1):
        assert allowed(guides.follow(guide, output[:known], ())) == allowed(living), f"behind {output[:known]!r}"
        if known < len(output):
            living.accept(output[known])


def test_where_the_form_is_complete_only_end_tokens_are_left(guides: Guides) -> None:
    digits = set(b"0123456789")
    assert allowed(guides.follow(DIGITS, b"1", ())) == digits
    assert allowed(guides.follow(DIGITS, b"12", ())) == digits | {END}
    assert allowed(guides.follow(DIGITS, b"123", ())) == {END}
    assert allowed(guides.follow(DIGITS, b"123", (5, 7, 10**6))) == {5, 7}, "the request has other stop tokens"


def test_behind_its_end_nothing_else_comes(guides: Guides) -> None:
    state = guides.follow(DIGITS, (*b"12", END, END), ())
    assert allowed(state) == {END}
    with pytest.raises(EngineError, match="had ended"):
        state.accept(ord("3"))


def test_output_of_another_form_is_an_error(guides: Guides) -> None:
    for output in (b"x", b"1x", b"1234", (*b"1", END)):
        with pytest.raises(EngineError, match="not of the form"):
            guides.follow(DIGITS, output, ())


def test_choices_are_taken_word_by_word(guides: Guides) -> None:
    choices = ["yes", "no", 'a "quoted" one', "two\nlines", "für 日本", "[a-z]*", "yesterday"]
    guide = Guide(kind="choice", text=json.dumps(choices))
    assert all(takes(guides, guide, choice) for choice in choices)
    assert not any(takes(guides, guide, other) for other in ("ye", "maybe", '"yes"', "abc", ""))


def test_json_may_be_indented_and_not_blank_for_ever(guides: Guides) -> None:
    guide = Guide(kind="json_object")
    assert takes(guides, guide, json.dumps({"a": [1, {"b": None}], "ü": "x\n"}, indent=4, ensure_ascii=False))
    assert takes(guides, guide, "{}")
    assert not takes(guides, guide, "[1]")
    assert not takes(guides, guide, "{" + " " * 100 + "}")


def test_a_grammar_is_written_in_lark(guides: Guides) -> None:
    guide = Guide(kind="grammar", text='start: pair ("," pair)*\npair: /[a-z]+/ "=" /[0-9]+/')
    assert takes(guides, guide, "a=1,bc=22")
    assert not takes(guides, guide, "a=1,")


@pytest.mark.parametrize(
    ("guide", "where", "why"),
    [
        (Guide(kind="json_schema", text='{"type": "objekt"}'), "response_format", "objekt"),
        (Guide(kind="json_schema", text="{"), "response_format", "EOF"),
        (Guide(kind="json_schema", text='{"type": "string", "format": "no-such"}'), "response_format", "no-such"),
        (Guide(kind="regex", text="(a"), "regex", "unclosed group"),
        (Guide(kind="choice", text='["a", 1]'), "choice", "list of one or more strings"),
        (Guide(kind="choice", text="yes"), "choice", "Expecting value"),
        (Guide(kind="grammar", text="start: missing"), "grammar", "missing"),
        (Guide(kind="regex", text="a" * 300_000), "regex", "300000 characters"),
    ],
    ids=lambda value: value.text[:40] if isinstance(value, Guide) else "",
)
def test_a_bad_guide_is_told_by_its_field(guides: Guides, guide: Guide, where: str, why: str) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match=re.escape(why)) as caught:
            guides.follow(guide, (), ())
        assert caught.value.where == where


def test_a_tokenizer_that_cannot_be_followed_is_told() -> None:
    files = structs.replace(byte_tokenizer(), tokenizer_json='{"model": {"type": "no such"}}')
    with pytest.raises(EngineError, match="cannot be guided"):
        Guides(files, SIZE)


def test_guides_are_compiled_once_and_the_oldest_forgotten(guides: Guides, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    grammar = module._grammar
    monkeypatch.setattr(module, "_KEPT", 2)
    monkeypatch.setattr(module, "_grammar", lambda guide: compiled.append(guide.text) or grammar(guide))
    for text in ("a", "b", "a", "c", "a", "b"):
        guides.follow(Guide(kind="regex", text=text), (), ())
    assert compiled == ["a", "b", "c", "b"]
