"""One answer in the making: tokens go in, the text that may go out comes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from pdd_runtime.frontend.language import Language
from pdd_runtime.frontend.stop import StopStrings
from pdd_runtime.pipeline import Finish
from pdd_runtime.plugins.engine import Token

FinishReason = Literal["stop", "length"]


class Entry(NamedTuple):
    """A token and where its text begins, in characters from the start of the answer."""

    token: Token
    offset: int


class Piece(NamedTuple):
    """What has become fit to be sent: text, and the tokens whose text begins in it or before it."""

    text: str
    entries: list[Entry]


class Choice:
    """Pure state, no I/O. One detokeniser for the whole answer, so seams between workers do not show.

    With `entries`, every token gives exactly one entry, sent together with its text. When a stop string is
    cut off, the tokens whose text begins in it, or behind it, give none.
    """

    def __init__(self, language: Language, stops: Sequence[str], *, entries: bool) -> None:
        self._detokenizer = language.detokenizer()
        self._stops = StopStrings(stops) if stops else None
        self._wants_entries = entries
        self._waiting: deque[Entry] = deque()
        self._texts: list[str] = []
        self._produced = 0
        self._passed = 0
        self.tokens = 0
        """How many were made, those of a stop string included."""
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        """Set as soon as its text is whole."""
        self.complete = False
        """Its session has ended as well, and said what it had cached."""
        self.cut = False
        """A stop string ended it; its session must be told."""

    def push(self, item: Token | Finish) -> bool:
        """Take the next item; True for the last one. Tokens that come behind a stop string are ignored."""
        if isinstance(item, Finish):
            self.complete, self.cached_tokens = True, item.cached_tokens
            if not self.cut:
                self._finish(item.reason)
            return True
        if self.cut:
            return False
        self.tokens += 1
        if self._wants_entries:
            self._waiting.append(Entry(item, self._produced))
        text = self._detokenizer.push(item.id)
        if text:
            self._let_through(text)
        return False

    def take(self) -> Piece:
        """All that may go out and has not yet."""
        text = "".join(self._texts)
        self._texts.clear()
        entries: list[Entry] = []
        while self._waiting and (self._waiting[0].offset < self._passed or self.finish_reason is not None):
            entries.append(self._waiting.popleft())
        return Piece(text, entries)

    def _let_through(self, text: str) -> None:
        self._produced += len(text)
        if self._stops is None:
            self._pass(text)
            return
        found = self._stops.push(text)
        self._pass(found.text)
        if found.stopped:
            self.finish_reason, self.cut = "stop", True
            self._waiting = deque(entry for entry in self._waiting if entry.offset < self._passed)

    def _pass(self, text: str) -> None:
        if text:
            self._texts.append(text)
            self._passed += len(text)

    def _finish(self, reason: FinishReason) -> None:
        rest = self._detokenizer.flush()
        if rest:
            self._let_through(rest)
        if self.finish_reason is None:
            if self._stops is not None:
                self._pass(self._stops.flush())
            self.finish_reason = reason
