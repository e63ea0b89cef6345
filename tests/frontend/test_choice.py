from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from pdd_runtime.frontend.calls import TaggedCalls
from pdd_runtime.frontend.choice import Choice, Entry, Piece
from pdd_runtime.frontend.language import Language
from pdd_runtime.frontend.reading import Plain, joined
from pdd_runtime.frontend.reasoning import Thinking
from pdd_runtime.pipeline import Finish
from pdd_runtime.plugins.engine import Token, TokenizerFiles

STOPS = ["END", "结束", "🎉!"]


def answer(
    language: Language, ids: list[int], stops: list[str], flushes: list[bool]
) -> tuple[Choice, str, list[Entry]]:
    """Push all, and take after those tokens where `flushes` says so."""
    choice = Choice(language, stops, entries=True)
    text, entries = "", []
    items: list[Token | Finish] = [*(Token(i, id, -float(i)) for i, id in enumerate(ids)), Finish("length", 3)]
    for i, item in enumerate(items):
        done = choice.push(item)
        if done or (flushes and flushes[i % len(flushes)]):
            piece = choice.take()
            assert all(entry.offset <= len(text) + len(piece.text) for entry in piece.entries)
            text += piece.text
            entries += piece.entries
        if done:
            break
    return choice, text, entries


@settings(max_examples=300)
@given(
    words=st.lists(st.sampled_from([*STOPS, "EN", "结", "🎉", " café ", "x"]), max_size=8),
    flushes=st.lists(st.booleans(), max_size=8),
)
async def test_a_stop_string_is_found_over_any_split_into_tokens(
    bytes_language: Language, byte_level: Language, words: list[str], flushes: list[bool]
) -> None:
    text = "".join(words)
    ends = {text.find(stop) + len(stop): text.find(stop) for stop in STOPS if stop in text}
    wanted = text[: ends[min(ends)]] if ends else text
    for language in (bytes_language, byte_level):
        ids = list(await language.encode(text, add_special_tokens=False))
        choice, got, entries = answer(language, ids, STOPS, flushes)
        assert got == wanted
        assert choice.finish_reason == ("stop" if ends else "length")
        # The tokens counted are those that had to be made; the entries those whose text begins in the answer.
        assert len(b"".join(language.token_bytes(i) for i in ids[: choice.tokens])) >= len(wanted.encode())
        assert [entry.token.id for entry in entries] == ids[: len(entries)]
        spelled = b"".join(language.token_bytes(entry.token.id) for entry in entries)
        assert spelled.startswith(wanted.encode())
        if not ends:
            assert len(entries) == choice.tokens == len(ids)
        elif language is bytes_language:
            assert spelled == wanted.encode()


async def test_every_token_gives_one_entry_the_end_token_too(byte_level: Language) -> None:
    ids = [*await byte_level.encode("a 🎉🎉 b", add_special_tokens=False), 1]
    choice, text, entries = answer(byte_level, ids, [], [True])
    assert text == "a 🎉🎉 b"
    assert [entry.token.id for entry in entries] == ids
    assert choice.tokens == len(ids)
    assert [entry.offset for entry in entries] == sorted(entry.offset for entry in entries)


async def test_entries_wait_for_their_text(bytes_language: Language) -> None:
    choice = Choice(bytes_language, ["<end>"], entries=True)
    seen: list[tuple[str, int]] = []
    for i, id in enumerate(b"a\xc3\xa9<e."):
        choice.push(Token(i, id))
        piece = choice.take()
        seen.append((piece.text, len(piece.entries)))
    assert seen == [("a", 1), ("", 0), ("é", 2), ("", 0), ("", 0), ("<e.", 3)]


async def test_after_a_stop_string_nothing_comes(bytes_language: Language) -> None:
    choice = Choice(bytes_language, ["!"], entries=False)
    for i, id in enumerate(b"hi!"):
        assert not choice.push(Token(i, id))
    assert (choice.cut, choice.finish_reason) == (True, "stop")
    assert choice.push(Token(3, ord("x"))) is False
    assert choice.push(Finish("length", 5)) is True
    assert choice.take() == Piece("hi", [])
    assert (choice.finish_reason, choice.tokens, choice.cached_tokens) == ("stop", 3, 5)


async def test_what_is_held_back_comes_out_at_the_end(bytes_language: Language) -> None:
    choice = Choice(bytes_language, ["<end>"], entries=True)
    for i, id in enumerate(b"a<en\xf0\x9f"):
        choice.push(Token(i, id))
    assert choice.push(Finish("stop", 7))
    piece = choice.take()
    assert piece.text == "a<en\ufffd"
    assert len(piece.entries) == 6
    assert (choice.finish_reason, choice.cached_tokens) == ("stop", 7)


async def test_what_was_taken_does_not_change_when_more_comes(bytes_language: Language) -> None:
    text = 'Hm. <tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
    choice = Choice(bytes_language, [], entries=True, reader=TaggedCalls())
    pieces: list[Piece] = []
    for i, id in enumerate(text.encode()):
        choice.push(Token(i, id))
        pieces.append(choice.take())
    choice.push(Finish("stop", 0))
    pieces.append(choice.take())
    parts = joined(part for piece in pieces for part in piece.parts)
    assert parts == [("content", "Hm."), ("call", "f"), ("arguments", '{"a": "é"}')]
    assert "".join(piece.text for piece in pieces) == "Hm."
    assert sum(len(piece.entries) for piece in pieces) == len(text.encode())
    assert choice.finish_reason == "tool_calls"


async def test_a_call_cut_at_any_token_is_the_same(bytes_language: Language, byte_level: Language) -> None:
    text = 'So: <tool_call>\n{"name": "the relay", "arguments": {"世界": ["🎉", "main worker"]}}\n</tool_call> done'
    for language in (bytes_language, byte_level):
        ids = await language.encode(text, add_special_tokens=False)
        for cut in range(len(ids) + 1):
            choice = Choice(language, [], entries=False, reader=TaggedCalls())
            pieces: list[Piece] = []
            for i, id in enumerate(ids):
                if i == cut:
                    pieces.append(choice.take())
                choice.push(Token(i, id))
            choice.push(Finish("stop", 0))
            pieces.append(choice.take())
            assert joined(part for piece in pieces for part in piece.parts) == [
                ("content", "So:"),
                ("call", "the relay"),
                ("arguments", '{"世界": ["🎉", "main worker"]}'),
                ("content", " done"),
            ]


@pytest.mark.parametrize("byte_level_decoder", [True, False])
def test_the_marks_of_calls_and_reasoning_are_read_even_where_they_are_special_tokens(byte_level_decoder: bool) -> None:
    words = ["<unk>", "hm", "!", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.ByteLevel() if byte_level_decoder else decoders.Fuse()
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>"]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in ("</s>", *marks)])
    language = Language(TokenizerFiles(tokenizer_json=tokenizer.to_str(), chat_template=None, eos_token_ids=(3,)))
    assert language.thinks
    ids = [tokenizer.token_to_id(token) for token in ("<think>", "hm", "</think>", "!", "</s>")]
    for reader, wanted in ((Thinking(Plain(), inside=False), [("reasoning", "hm"), ("content", "!")]), (None, [])):
        choice = Choice(language, [], entries=False, reader=reader)
        for i, id in enumerate(ids):
            choice.push(Token(i, id))
        choice.push(Finish("stop", 0))
        piece = choice.take()
        assert joined(piece.parts) == wanted
        assert piece.text == ("!" if wanted else "hm!")
