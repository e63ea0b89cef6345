"""How an answer looks on the wire: the shape both endpoints share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import msgspec

from pdd_runtime.frontend.choice import FinishReason, Piece
from pdd_runtime.frontend.language import Language

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"
"""The last event of a stream that ended well, and of no other."""


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a whole request, all its choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Whole(NamedTuple):
    """A finished choice."""

    piece: Piece
    reason: FinishReason


class Form(ABC):
    """Server-sent events of a stream, or the body of a whole answer.

    Every chunk of a request begins and ends with the same bytes, so those are made once, and only the text
    between them is encoded.
    """

    id_prefix: ClassVar[str]
    chunk_object: ClassVar[str]
    whole_object: ClassVar[str]

    def __init__(
        self, request_id: str, model: str, language: Language, *, logprobs: bool, token_ids: bool, usage: bool
    ) -> None:
        """`usage`: a stream ends with a chunk of usage, and the others say that theirs is null."""
        self.language, self.logprobs, self.token_ids, self.usage = language, logprobs, token_ids, usage
        self._request = request_id.removeprefix("req-")
        self._id = f"{self.id_prefix}-{self._request}"
        self._calls: Counter[int] = Counter()
        """Calls of tools that each choice has made so far."""
        self._model, self._created = model, int(time.time())
        self._head = b"data: " + encode(self._top(self.chunk_object)).removesuffix(b"}") + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"

    @property
    def wants_entries(self) -> bool:
        return self.logprobs or self.token_ids

    def opening(self, index: int) -> bytes:
        """What stands before the first text of a choice."""
        return b""

    def delta(self, index: int, piece: Piece) -> bytes:
        return self._event(index, self._content(piece.text), piece, b"null")

    def closing(self, index: int, reason: FinishReason) -> bytes:
        return self._event(index, self._empty(), None, encode(reason))

    def ending(self, usage: Usage) -> bytes:
        """The last bytes of the whole stream."""
        if not self.usage:
            return DONE
        return self._head + b'],"usage":' + encode(usage) + b"}\n\n" + DONE

    def whole(self, choices: Sequence[Whole], usage: Usage) -> bytes:
        return encode(
            self._top(self.whole_object)
            | {"choices": [self._choice(i, whole) for i, whole in enumerate(choices)], "usage": usage}
        )

    @abstractmethod
    def _content(self, text: str) -> bytes:
        """`"name":value` of a chunk's text."""

    @abstractmethod
    def _empty(self) -> bytes:
        """The same for a chunk without text."""

    @abstractmethod
    def _message(self, index: int, piece: Piece) -> dict[str, object]:
        """What a whole choice says, as its key and value."""

    @abstractmethod
    def _logprobs(self, piece: Piece) -> object:
        """The `logprobs` value of a piece with entries."""

    def _choice(self, index: int, whole: Whole) -> dict[str, object]:
        choice: dict[str, object] = {"index": index} | self._message(index, whole.piece)
        choice["logprobs"] = self._logprobs(whole.piece) if self.logprobs else None
        choice["finish_reason"] = whole.reason
        if self.token_ids:
            choice["token_ids"] = [entry.token.id for entry in whole.piece.entries]
        return choice

    def _event(self, index: int, content: bytes, piece: Piece | None, reason: bytes) -> bytes:
        logprobs = encode(self._logprobs(piece)) if piece is not None and self.logprobs else b"null"
        parts = [self._head, b'{"index":%d,' % index, content, b',"logprobs":', logprobs]
        if self.token_ids and piece is not None:
            parts += (b',"token_ids":', encode([entry.token.id for entry in piece.entries]))
        parts += (b',"finish_reason":', reason, b"}", self._tail)
        return b"".join(parts)

    def _top(self, kind: str) -> dict[str, object]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}
