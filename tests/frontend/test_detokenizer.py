from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from pdd_runtime.frontend.detokenizer import byte_table
from pdd_runtime.frontend.language import Language

TEXTS = [
    "The main worker extends.",
    "你好，世界！ and 日本語",
    "family 👩‍👩‍👧, party 🎉, flag 🇨🇭, \u200bzero width",
    "naïve café — “quotes” … Ωμέγα",
    "tabs\tand\n\nlines\n    indented, double  spaces ",
    " leading space",
    "unseen: ᚠᛇᚻ 𝔘𝔫𝔦 Ж",
    "\ufffd itself \ufffd",
]


def streamed(language: Language, tokens: Sequence[int]) -> list[str]:
    detokenizer = language.detokenizer()
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def test_the_byte_table_is_the_tokenizers_own() -> None:
    assert set(byte_table()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_table().values()) == list(range(256))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece", "bytes_language"])
async def test_streamed_text_is_the_text(text: str, kind: str, request: pytest.FixtureRequest) -> None:
    language: Language = request.getfixturevalue(kind)
    tokens = await language.encode(text, add_special_tokens=False)
    assert "".join(streamed(language, tokens)) == text


@settings(max_examples=300)
@given(tokens=st.lists(st.integers(0, 410), max_size=40))
def test_any_tokens_at_all_stream_as_the_tokenizer_decodes_them(byte_level: Language, tokens: list[int]) -> None:
    whole = byte_level._tokenizer.decode(tokens, skip_special_tokens=True)
    assert "".join(streamed(byte_level, tokens)) == whole


@settings(max_examples=200)
@given(text=st.text(max_size=30))
async def test_any_text_streams_through_byte_fallback(sentencepiece: Language, text: str) -> None:
    tokens = await sentencepiece.encode(text, add_special_tokens=False)
    whole = sentencepiece._tokenizer.decode(list(tokens), skip_special_tokens=True)
    assert "".join(streamed(sentencepiece, tokens)) == whole


@settings(max_examples=200)
@given(text=st.text(max_size=20))
async def test_no_piece_ever_holds_half_a_character(bytes_language: Language, text: str) -> None:
    tokens = await bytes_language.encode(text, add_special_tokens=False)
    pieces = streamed(bytes_language, tokens)
    assert "".join(pieces) == text
    at = 0
    for piece, token_count in zip(pieces, range(1, len(tokens) + 1), strict=False):
        at += len(piece)
        # As much as the bytes so far spell, and not a character less.
        assert len(text[:at].encode()) <= token_count < len(text[: at + 1].encode()) or at == len(text)


async def test_special_tokens_are_not_text(byte_level: Language) -> None:
    tokens = await byte_level.encode("a<|end|>b<think>c", add_special_tokens=False)
    assert 1 in tokens
    assert "".join(streamed(byte_level, tokens)) == "ab<think>c"


async def test_bytes_that_never_become_a_character_are_shown_at_the_end(bytes_language: Language) -> None:
    tokens = await bytes_language.encode("ok🎉", add_special_tokens=False)
    pieces = streamed(bytes_language, tokens[:-1])
    assert pieces == ["o", "k", "", "", "", "\ufffd"]


async def test_a_token_that_is_the_replacement_character_comes_out(sentencepiece: Language) -> None:
    tokens = await sentencepiece.encode("a\ufffdb", add_special_tokens=False)
    assert "".join(streamed(sentencepiece, tokens)) == "a\ufffdb"
