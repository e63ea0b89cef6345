"""One answer in the making: tokens go in, the text that may go out comes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

import msgspec

from pdd_runtime.frontend.language import Language
from pdd_runtime.frontend.reading import Part, Reader
from pdd_runtime.frontend.stop import StopStrings
from pdd_runtime.pipeline import Finish
from pdd_runtime.plugins.engine import Token

FinishReason = Literal["stop", "length", "tool_calls"]


class Entry(NamedTuple):
    """A token and where its text begins, in characters from the start of the answer."""

    token: Token
    offset: int


class Piece(msgspec.Struct, frozen=True):
    """What has become fit to be sent, and the tokens whose text begins in it or before it."""

    text: str
    """Content only."""
    entries: list[Entry]
    parts: Sequence[Part] = ()
    """The same and more, of a choice that has a reader."""

    def __bool__(self) -> bool:
        return bool(self.text or self.entries or self.parts)


class Choice:
    """Pure state, no I/O. One detokeniser for the whole answer, so seams between workers do not show.

    With `entries`, every token gives exactly one entry, sent together with its text. When a stop string is
    cut off, the tokens whose text begins in it, or behind it, give none.
    """

    def __init__(
        self,
        language: Language,
        stops: Sequence[str],
        *,
        entries: bool,
        reader: Reader | None = None,
        stop_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        echo: Piece | None = None,
    ) -> None:
        """`reader`: says what the text means; none: it is content. `stop_token_ids`: their text is not part of the
        answer. `min_tokens`: so many tokens' text is not searched for stop strings. `echo`: said before the answer."""
        self._detokenizer = language.detokenizer(markers=reader is not None)
        self._stops = StopStrings(stops) if stops else None
        self._wants_entries = entries
        self._reader, self._parts = reader, list[Part]()
        self._called = False
        self._silent, self._min_tokens = frozenset(stop_token_ids), min_tokens
        self._waiting: deque[Entry] = deque()
        self._texts: list[str] = []
        self._produced = self._passed = 0
        if echo is not None:
            self._texts.append(echo.text)
            self._produced = self._passed = len(echo.text)
            self._waiting.extend(echo.entries)
        self.tokens = 0
        """How many were made, those of a stop string included."""
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        """Set as soon as its text is whole."""
        self.cut = False
        """A stop string ended it; its session must be told."""

    def push(self, item: Token | Finish) -> bool:
        """Take the next item; True for the last one. Tokens that come behind a stop string are ignored."""
        if isinstance(item, Finish):
            self.cached_tokens = item.cached_tokens
            if not self.cut:
                self._finish(item.reason)
            return True
        if self.cut:
            return False
        self.tokens += 1
        if self._wants_entries:
            self._waiting.append(Entry(item, self._produced))
        text = "" if item.id in self._silent else self._detokenizer.push(item.id)
        if text:
            self._let_through(text)
        return False

    def take(self) -> Piece:
        """All that may go out and has not yet."""
        text, parts = "".join(self._texts), tuple(self._parts)
        self._texts.clear()
        self._parts.clear()
        entries: list[Entry] = []
        while self._waiting and (self._waiting[0].offset < self._passed or self.finish_reason is not None):
            entries.append(self._waiting.popleft())
        return Piece(text, entries, parts)

    def _let_through(self, text: str) -> None:
        self._produced += len(text)
        if self._stops is None or self.tokens <= self._min_tokens:
            self._pass(text)
            return
        found = self._stops.push(text)
        self._pass(found.text)
        if found.stopped:
            self.cut = True
            self._end("stop")
            self._waiting = deque(entry for entry in self._waiting if entry.offset < self._passed)

    def _pass(self, text: str) -> None:
        if text:
            self._passed += len(text)
            if self._reader is None:
                self._texts.append(text)
            else:
                self._read(self._reader.push(text))

    def _read(self, parts: list[Part]) -> None:
        self._parts += parts
        for kind, text in parts:
            if kind == "content":
                self._texts.append(text)
            elif kind == "call":
                self._called = True

    def _finish(self, reason: Literal["stop", "length"]) -> None:
        rest = self._detokenizer.flush()
        if rest:
            self._let_through(rest)
        if self.finish_reason is None:
            if self._stops is not None:
                self._pass(self._stops.flush())
            self._end(reason)

    def _end(self, reason: Literal["stop", "length"]) -> None:
        """The text is whole."""
        if self._reader is not None:
            self._read(self._reader.flush())
        self.finish_reason = "tool_calls" if self._called and reason == "stop" else reason
