"""Calls of tools in an answer's text, in the ways that model families write them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

from pdd_runtime.frontend.call_object import CallObject
from pdd_runtime.frontend.function_tags import FunctionTags
from pdd_runtime.frontend.reading import Part, Reader, overlap

Style = Literal["hermes", "qwen-coder", "llama", "mistral"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION = "<function="
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS = "[TOOL_CALLS]"
MARKERS = frozenset((OPEN, CLOSE, PYTHON_TAG, TOOL_CALLS, "[ARGS]", "[CALL_ID]"))
"""Those that may be tokens of their own."""


class _Steps(Reader):
    """Goes on by one change of state after the other, over the text that it holds."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._held and self._step(parts):
            pass
        return parts

    @abstractmethod
    def _step(self, parts: list[Part]) -> bool:
        """One change of state; False when more text is needed."""

    def _until(self, marker: str, kind: Literal["content", "arguments"], parts: list[Part]) -> bool:
        """Give out what stands before `marker`, and go behind it; False when it has not come yet."""
        at = self._held.find(marker)
        end = at if at >= 0 else len(self._held) - overlap(self._held, marker)
        # A space may turn out to stand before the marker, so it waits for what comes behind it.
        if text := self._held[:end].rstrip():
            parts.append(Part(kind, text))
        self._held = self._held[len(text) :] if at < 0 else self._held[at + len(marker) :]
        return at >= 0


class TaggedCalls(_Steps):
    """`<tool_call>…</tool_call>` between other text: Hermes, Qwen, and the many that follow them.

    White space around calls is dropped. What stands between the tags and is no call stays content, tags included.
    """

    def __init__(self, new_call: Callable[[], CallObject | FunctionTags] = CallObject) -> None:
        """`new_call`: reads what stands between the tags."""
        super().__init__()
        self._new_call = new_call
        self._state: Literal["outside", "inside", "after", "broken"] = "outside"
        self._call = new_call()
        self._called = False

    def flush(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._state == "inside" and not self._call.begun:
            held = OPEN + self._call.raw
        elif self._state != "outside" or (self._called and held.isspace()):
            return []
        return [Part("content", held)] if held else []

    def _step(self, parts: list[Part]) -> bool:
        match self._state:
            case "outside":
                if not self._until(OPEN, "content", parts):
                    return False
                self._state, self._call = "inside", self._new_call()
                return True
            case "inside":
                return self._inside(parts)
            case "after":
                return self._after()
            case "broken":
                return self._broken()

    def _inside(self, parts: list[Part]) -> bool:
        text, self._held = self._held, ""
        made, rest = self._call.push(text)
        parts += made
        if self._call.state == "open":
            return False
        if self._call.state == "done":
            self._called, self._held, self._state = True, rest, "after"
        elif self._call.begun:
            self._called, self._held, self._state = True, self._call.unread, "broken"
        else:
            parts.append(Part("content", OPEN))
            self._held, self._state = self._call.raw, "outside"
        return True

    def _after(self) -> bool:
        self._held = self._held.lstrip()
        if self._held.startswith(CLOSE):
            self._held = self._held[len(CLOSE) :]
        elif CLOSE.startswith(self._held):
            return False
        self._state = "outside"
        return True

    def _broken(self) -> bool:
        at = self._held.find(CLOSE)
        if at < 0:
            self._held = self._held[len(self._held) - overlap(self._held, CLOSE) :]
            return False
        self._held, self._state = self._held[at + len(CLOSE) :], "outside"
        return True


class BareCalls(_Steps):
    """An answer that is nothing but one or several JSON objects, each a call: Llama 3, and forced calls, which are a
    JSON list. What is no call of a known tool is content."""

    def __init__(self, names: Collection[str] | None, between: str) -> None:
        """`names`: of the tools; none: any. `between`: the characters that may stand before, between and behind the
        objects."""
        super().__init__()
        self._names, self._between = names, between
        self._skipped = ""
        self._call: CallObject | None = None
        self._plain = False

    def flush(self) -> list[Part]:
        if self._call is not None:
            return [] if self._call.begun else self._content(self._call.raw)
        return self._content(self._held) if self._held else []

    def _step(self, parts: list[Part]) -> bool:
        text, self._held = self._held, ""
        if self._plain:
            parts.append(Part("content", text))
            return False
        if self._call is None:
            return self._before(text, parts)
        made, rest = self._call.push(text)
        parts += made
        if self._call.state == "bad" and not self._call.begun:
            parts += self._content(self._call.raw)
        elif self._call.state == "bad":
            parts += self._content(self._call.unread)
        elif self._call.state == "done":
            self._call, self._held = None, rest
            return True
        return False

    def _before(self, text: str, parts: list[Part]) -> bool:
        head = text.lstrip(self._between)
        self._skipped += text[: len(text) - len(head)]
        if head.startswith(PYTHON_TAG):
            self._skipped, self._held = "", head[len(PYTHON_TAG) :]
            return True
        if head.startswith("{"):
            self._call, self._held = CallObject(self._names), head
            return True
        if PYTHON_TAG.startswith(head):
            self._held = head
            return False
        parts += self._content(head)
        return False

    def _content(self, text: str) -> list[Part]:
        """The rest is no call, and neither is what was skipped since the last one."""
        self._call, self._plain, self._held = None, True, ""
        text, self._skipped = self._skipped + text, ""
        return [Part("content", text)] if text else []


class MarkedCalls(_Steps):
    """Text, then `[TOOL_CALLS]` and a JSON list of calls, or `[TOOL_CALLS]name[ARGS]{…}`, once for each: Mistral.

    White space before a marker is dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._state: Literal["outside", "marked", "list", "arguments"] = "outside"
        self._list = BareCalls(None, LIST_BETWEEN)

    def flush(self) -> list[Part]:
        held, self._held = self._held, ""
        match self._state:
            case "outside":
                return [Part("content", held)] if held else []
            case "marked":
                return [Part("content", TOOL_CALLS + held)]
            case "list":
                return self._list.flush()
            case "arguments":
                return [Part("arguments", held)] if held.strip() else []

    def _step(self, parts: list[Part]) -> bool:
        match self._state:
            case "outside" | "arguments":
                kind: Literal["content", "arguments"] = "content" if self._state == "outside" else "arguments"
                if not self._until(TOOL_CALLS, kind, parts):
                    return False
                self._state = "marked"
                return True
            case "list":
                text, self._held = self._held, ""
                parts += self._list.push(text)
                return False
            case "marked":
                return self._marked(parts)

    def _marked(self, parts: list[Part]) -> bool:
        head = self._held.lstrip()
        if head[:1] in ("[", "{"):
            self._state = "list"
            return True
        name, begins, arguments = head.partition("{")
        if not begins:
            return False
        parts.append(Part("call", name.partition("[")[0].strip()))
        self._held, self._state = begins + arguments, "arguments"
        return True


class ArgumentsOnly(Reader):
    """The text is the arguments of one call, as a guide sees to."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[Part]:
        name, self._name = self._name, None
        return ([Part("call", name)] if name else []) + ([Part("arguments", text)] if text else [])

    def flush(self) -> list[Part]:
        return []


LLAMA_BETWEEN = "; \t\r\n"
LIST_BETWEEN = "[], \t\r\n"


def reader_for(style: Style, schemas: Mapping[str, Mapping[str, Any]]) -> Reader:
    """For an answer in which the model may call tools in its own way; `schemas`: of the tools' parameters, by name."""
    match style:
        case "hermes":
            return TaggedCalls()
        case "qwen-coder":
            return TaggedCalls(lambda: FunctionTags(schemas))
        case "llama":
            return BareCalls(schemas, LLAMA_BETWEEN)
        case "mistral":
            return MarkedCalls()
