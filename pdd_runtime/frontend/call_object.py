"""One call of a tool, as a JSON object that is still being written."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Literal

from pdd_runtime.frontend.reading import Part

ARGUMENTS = ("arguments", "parameters")
"""The keys by which model families name them."""
_SCALAR = frozenset("+-.0123456789eEtrufalsn")


class CallObject:
    """Reads `{"name": …, "arguments": {…}}` character by character; keys may come in any order.

    The name goes out as soon as it is known, and the arguments as they are written, if the name came first. The text
    is not checked as JSON beyond what is needed to find its end: a model's mistakes are for the caller to find.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        """`names`: an object with another name is no call."""
        self._names = names
        self.raw = ""
        """All that was read."""
        self.state: Literal["open", "done", "bad"] = "open"
        """`bad`: this is no call, or its object is broken."""
        self.begun = False
        """The name has gone out."""
        self._at = self._depth = self._start = self._sent = 0
        self._in_string = self._escaped = self._streams = False
        self._expects: Literal["key", "colon", "value", "end"] = "key"
        self._key = ""
        self._arguments: str | None = None
        self._out: list[Part] = []

    @property
    def unread(self) -> str:
        """What came in behind the place where a `bad` object broke."""
        return self.raw[self._at :]

    def push(self, text: str) -> tuple[list[Part], str]:
        """What is certain now, and the text behind the object where it has ended (`raw` is then without it)."""
        self.raw += text
        rest = ""
        while self._at < len(self.raw):
            self._step(self._at, self.raw[self._at])
            if self.state == "bad":
                break
            self._at += 1
            if self.state == "done":
                rest, self.raw = self.raw[self._at :], self.raw[: self._at]
                break
        if self._streams:
            self._send(self._at)
        out, self._out = self._out, []
        return out, rest

    def _step(self, at: int, char: str) -> None:
        if self._in_string:
            self._in_text(at, char)
        elif char.isspace():
            pass
        elif self._depth == 0:
            self._depth, self.state = 1, self.state if char == "{" else "bad"
        elif self._depth == 1:
            self._at_top(at, char)
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 1 and self._streams:
                self._send(at + 1)
                self._streams = False
        elif char not in ",:" and char not in _SCALAR:
            self.state = "bad"

    def _in_text(self, at: int, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1 and self._expects == "key":
                self._key, self._expects = str(self._value(at + 1)), "colon"
            elif self._depth == 1 and self._key == "name":
                self._name(self._value(at + 1))

    def _at_top(self, at: int, char: str) -> None:
        """Between the keys and values of the call itself."""
        match self._expects:
            case "key" if char == '"':
                self._start, self._in_string = at, True
            case "key" if char == "}":
                self._close()
            case "key" if char == ",":
                pass
            case "colon" if char == ":":
                self._expects = "value"
            case "value" if char in '"{[' or char in _SCALAR:
                self._open_value(at, char)
            case "end" if char in ",}":
                self._close_value(at)
                self._expects = "key"
                if char == "}":
                    self._close()
            case "end" if char in _SCALAR:
                pass
            case _:
                self.state = "bad"

    def _open_value(self, at: int, char: str) -> None:
        self._start, self._expects = at, "end"
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth = 2
            if char == "{" and self._key in ARGUMENTS and self.begun and self._arguments is None:
                self._arguments, self._streams, self._sent = "", True, at

    def _close_value(self, at: int) -> None:
        if self._key in ARGUMENTS and self._arguments is None:
            value = self._value(at)
            # Some models write the arguments as OpenAI sends them: JSON inside a JSON text.
            self._arguments = value if isinstance(value, str) else self.raw[self._start : at].strip()
            if self._arguments in ("", "null"):
                self._arguments = "{}"
            if self.begun:
                self._out.append(Part("arguments", self._arguments))

    def _close(self) -> None:
        if not self.begun:
            self.state = "bad"
            return
        if self._arguments is None:
            self._out.append(Part("arguments", "{}"))
        self.state = "done"

    def _name(self, name: object) -> None:
        if not isinstance(name, str) or not name or (self._names is not None and name not in self._names):
            self.state = "bad"
        elif not self.begun:
            self.begun = True
            self._out.append(Part("call", name))
            if self._arguments is not None:
                self._out.append(Part("arguments", self._arguments))

    def _send(self, to: int) -> None:
        if to > self._sent:
            self._out.append(Part("arguments", self.raw[self._sent : to]))
            self._sent = to

    def _value(self, end: int) -> object:
        try:
            return json.loads(self.raw[self._start : end])
        except ValueError:
            return None
