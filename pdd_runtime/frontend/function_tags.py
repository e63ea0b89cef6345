"""One call of a tool, as tags around bare values that are still being written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

from pdd_runtime.frontend.reading import Part

_FUNCTION = re.compile(r"<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>(.*?)</parameter>", re.DOTALL)
_END = "</function>"


class FunctionTags:
    """Reads `<function=NAME><parameter=KEY>VALUE</parameter>…</function>`, and gives out what `CallObject` would: each
    parameter once it is whole, for a value is text or JSON as the tool's own schema says."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        """`schemas`: of each tool's parameters, by the tool's name."""
        self._schemas = schemas
        self.raw = ""
        """All that was read."""
        self.state: Literal["open", "done", "bad"] = "open"
        """`bad`: this is no call, or it is broken."""
        self._at = 0
        self._name = ""
        self._opened = False

    @property
    def begun(self) -> bool:
        """The name has gone out."""
        return bool(self._name)

    @property
    def unread(self) -> str:
        """What came in behind the place where a `bad` call broke."""
        return self.raw[self._at :]

    def push(self, text: str) -> tuple[list[Part], str]:
        """What is certain now, and the text behind the call where it has ended (`raw` is then without it)."""
        self.raw += text
        parts: list[Part] = []
        while self.state == "open" and self._step(parts):
            pass
        rest = ""
        if self.state == "done":
            rest, self.raw = self.raw[self._at :], self.raw[: self._at]
        return parts, rest

    def _step(self, parts: list[Part]) -> bool:
        """One tag further; False when more text is needed."""
        text = self.unread.lstrip()
        at = len(self.raw) - len(text)
        if not self._name:
            if (function := _FUNCTION.match(text)) is not None:
                self._name, self._at = function[1], at + function.end()
                parts.append(Part("call", self._name))
                return True
            return self._wait(text, "<function=")
        if text.startswith(_END):
            parts.append(Part("arguments", "}" if self._opened else "{}"))
            self._at, self.state = at + len(_END), "done"
            return False
        if (parameter := _PARAMETER.match(text)) is not None:
            key, value = parameter[1], parameter[2].removeprefix("\n").removesuffix("\n")
            opening = ", " if self._opened else "{"
            parts.append(Part("arguments", f"{opening}{json.dumps(key, ensure_ascii=False)}: {self._json(key, value)}"))
            self._opened, self._at = True, at + parameter.end()
            return True
        return self._wait(text, "<parameter=", _END)

    def _wait(self, text: str, *tags: str) -> bool:
        """`text` may become one of the tags, or it is none and never will be."""
        if not any(tag.startswith(text[: len(tag)]) and _open(text, tag) for tag in tags):
            self.state = "bad"
        return False

    def _json(self, key: str, value: str) -> str:
        schema = (self._schemas.get(self._name, {}).get("properties") or {}).get(key)
        kind = schema.get("type", "") if isinstance(schema, dict) else "string"
        if "string" not in kind and (kind or value[:1] in ("{", "[")):
            try:
                return json.dumps(json.loads(value), ensure_ascii=False)
            except (ValueError, RecursionError):
                pass
        return json.dumps(value, ensure_ascii=False)


def _open(text: str, tag: str) -> bool:
    """The tag's own name, which ends with `>`, is whole or still being written."""
    name, closed, _ = text[len(tag) :].partition(">")
    return bool(name or not closed) and not any(char in name for char in "<\n")
