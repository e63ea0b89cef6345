"""The model's language: text to tokens, tokens to text, messages to a prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from pdd_runtime.errors import EngineError, RequestError
from pdd_runtime.frontend.calls import FUNCTION, MARKERS, PYTHON_TAG, TOOL_CALLS, Style
from pdd_runtime.frontend.calls import OPEN as CALL_OPEN
from pdd_runtime.frontend.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, byte_table
from pdd_runtime.frontend.preamble import with_tools
from pdd_runtime.frontend.reasoning import CLOSE as THINK_CLOSE
from pdd_runtime.frontend.reasoning import OPEN as THINK_OPEN
from pdd_runtime.frontend.template import ChatTemplate
from pdd_runtime.plugins.engine import TokenizerFiles

_LONG = 16_384
"""Characters above which encoding takes milliseconds, and so gets a thread."""


class Language:
    """Loaded once per model and shared by all requests; detokenisers are per request."""

    def __init__(self, files: TokenizerFiles) -> None:
        """Raises `EngineError` where the files cannot be read. Takes up to a second for large vocabularies."""
        try:
            self._tokenizer = Tokenizer.from_str(files.tokenizer_json)
        except Exception as error:  # the library raises bare Exception
            raise EngineError("the model's tokenizer cannot be read", why=str(error)) from error
        # A prompt is never shortened or filled up behind the user's back, whatever the file was saved with.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.eos_token_ids = files.eos_token_ids
        self.vocabulary_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._template = ChatTemplate(files.chat_template, files.special_tokens) if files.chat_template else None
        self._special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        decoder = json.loads(files.tokenizer_json).get("decoder") or {}
        self._byte_level = decoder.get("type") == "ByteLevel"
        self._byte_of = byte_table()
        self._known: dict[int, bytes] = {}
        added = {token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items()}
        source = files.chat_template or ""
        self.thinks = THINK_OPEN in source or THINK_CLOSE in source or THINK_CLOSE in added
        """The model reasons, or can, before it answers."""
        self.takes_tools = self._template is not None and "tools" in self._template.variables
        self.call_style = _call_style(source, added) if self.takes_tools else "hermes"
        """How the model writes calls of tools; a model that is told of them in our words does it in Hermes's way."""
        self.marker_ids = {text: i for text, i in added.items() if text in MARKERS}
        """What stands around calls and is a token of its own."""
        self._markers = {*self.marker_ids.values(), *(added[t] for t in (THINK_OPEN, THINK_CLOSE) if t in added)}

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """`add_special_tokens`: what the model wants before a plain text; a chat template writes its own."""
        if len(text) > _LONG:
            encoding = await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)
        else:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; `more`: further variables of the template. Raises `RequestError` where the model has no
        template, or it refuses."""
        if self._template is None:
            raise RequestError(
                "this model has no chat template", where="messages", fix="send the prompt to /v1/completions"
            )
        if not self.takes_tools:
            messages, tools = with_tools(messages, tools), ()
        return self._template.render(messages, tools, more)

    def knows(self, variable: str) -> bool:
        """Whether the chat template can be told this."""
        return self._template is not None and variable in self._template.variables

    def detokenizer(self, *, markers: bool = False) -> Detokenizer:
        """`markers`: the special tokens that enclose reasoning and calls are text like any other."""
        hidden = self._special - self._markers if markers else self._special
        if self._byte_level:
            return ByteDetokenizer(lambda token: b"" if token in hidden else self.token_bytes(token))
        return WindowDetokenizer(self._tokenizer, hidden.__contains__)

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for, special tokens by their name; empty for an id out of the vocabulary."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._find_bytes(token)
        return known

    def token_name(self, token: int) -> str:
        """A token as users read it: its text, or its bytes where they are no whole text, as OpenAI writes it."""
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _find_bytes(self, token: int) -> bytes:
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return b""
        if token in self._special:
            return written.encode()
        if self._byte_level:
            table = self._byte_of
            return bytes(table[c] for c in written) if all(c in table for c in written) else written.encode()
        if len(written) == 6 and written.startswith("<0x") and written.endswith(">"):
            return bytes([int(written[3:5], 16)])
        # Sentencepiece writes a space as U+2581; decoding the token alone could strip it.
        return written.replace("\u2581", " ").encode()


def _call_style(template: str, added: Collection[str]) -> Style:
    """`added`: the tokens that stand in no text."""
    if CALL_OPEN in template:
        return "qwen-coder" if FUNCTION in template else "hermes"
    if TOOL_CALLS in template or TOOL_CALLS in added:
        return "mistral"
    return "llama" if PYTHON_TAG in template or PYTHON_TAG in added else "hermes"
