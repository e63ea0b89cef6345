"""Promises of the tokenizer with a token per byte."""

from __future__ import annotations

import jinja2
from tokenizers import Tokenizer

from pdd_runtime.testing.byte_tokenizer import END, SIZE, START, byte_tokenizer


def test_any_text_comes_back_and_a_byte_is_its_own_id() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer().tokenizer_json)
    for text in ("plain", "Grüße, 漢字 und 🙂\n\ttabs", "".join(map(chr, range(256)))):
        assert tokenizer.encode(text).ids == list(text.encode())
        assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.get_vocab_size() == SIZE


def test_the_template_marks_turns_with_special_tokens() -> None:
    files = byte_tokenizer()
    assert files.chat_template is not None
    text = jinja2.Template(files.chat_template).render(
        messages=[{"role": "user", "content": "Hi"}], add_generation_prompt=True, **files.special_tokens
    )
    ids = Tokenizer.from_str(files.tokenizer_json).encode(text).ids
    assert (ids.count(START), ids.count(END)) == (2, 1)
    assert files.eos_token_ids == (END,)
