"""Tokens become text, one at a time, and never half a character."""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable
from typing import Protocol

from tokenizers import Tokenizer

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """One per request, for its whole life: a handoff between workers does not disturb it."""

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character lacks bytes, and for special tokens."""
        ...

    def flush(self) -> str:
        """What is left at the end; bytes that never became a character are U+FFFD."""
        ...


def byte_table() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves; the 68 other bytes were given the characters from
    U+0100 on, in order (the GPT-2 vocabulary's convention).
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


class ByteDetokenizer:
    """For byte-level vocabularies: each token is a run of bytes, whatever stands around it.

    `push` over all tokens plus `flush` equals `tokenizer.decode` of the whole, for any tokens.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """`token_bytes`: a token's bytes, empty for those that are skipped."""
        self._bytes = token_bytes
        self._cut = b""
        """The beginning of a character, of which more bytes must come."""

    def push(self, token: int) -> str:
        data = self._cut + self._bytes(token)
        text, used = utf_8_decode(data, "replace", False)
        self._cut = data[used:]
        return text

    def flush(self) -> str:
        data, self._cut = self._cut, b""
        return data.decode(errors="replace")


class WindowDetokenizer:
    """For every other vocabulary (sentencepiece with byte fallback, word pieces): a token's text may depend
    on its neighbours, so it is the difference between decoding with it and without it.

    Only the tokens since the last text that went out are decoded again, with that text's own tokens before
    them as context. `push` over all tokens plus `flush` equals `tokenizer.decode` of the whole wherever its
    byte tokens form valid UTF-8; where they do not, decoders differ in how many U+FFFD they write.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: Callable[[int], bool]) -> None:
        self._tokenizer, self._skipped = tokenizer, skipped
        self._context: list[int] = []
        self._before = ""
        self._held: list[int] = []

    def push(self, token: int) -> str:
        if self._skipped(token):
            return ""
        self._held.append(token)
        text = self._text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._context, self._held = self._held, []
        self._before = self._decode(self._context)
        return text

    def flush(self) -> str:
        text = self._text() if self._held else ""
        self._held = []
        return text

    def _text(self) -> str:
        whole = self._decode(self._context + self._held)
        if whole.startswith(self._before):
            return whole[len(self._before) :]
        # The new tokens changed how the old ones are written, and those are out already.
        return self._decode(self._held)

    def _decode(self, tokens: list[int]) -> str:
        # Those to be skipped are not among them; a special token that is wanted would be lost.
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))
