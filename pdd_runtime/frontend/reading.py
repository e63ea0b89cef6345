"""What an answer's text means: content, reasoning, calls of tools. Pure, and the same wherever the text is cut."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal, NamedTuple


class Part(NamedTuple):
    """A stretch of an answer. `call` begins a call, its text is the tool's name; `arguments` is more of the newest
    call's arguments, which are JSON."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str


class Reader(ABC):
    """Takes text as it comes. The parts given out, joined, depend on the whole text alone and not on its pieces."""

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """What is certain now."""

    @abstractmethod
    def flush(self) -> list[Part]:
        """The text has ended: what was held back."""


def joined(parts: Iterable[Part]) -> list[Part]:
    """Stretches of one kind that follow each other become one; every call stays its own."""
    whole: list[tuple[Literal["content", "reasoning", "call", "arguments"], list[str]]] = []
    for kind, text in parts:
        if whole and whole[-1][0] == kind != "call":
            whole[-1][1].append(text)
        else:
            whole.append((kind, [text]))
    return [Part(kind, "".join(texts)) for kind, texts in whole]


def overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker`, without being all of it."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return size
    return 0


class Plain(Reader):
    """All of it is content."""

    def push(self, text: str) -> list[Part]:
        return [Part("content", text)] if text else []

    def flush(self) -> list[Part]:
        return []
