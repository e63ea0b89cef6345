"""Reasoning: what a model writes between `<think>` and `</think>` before its answer."""

from __future__ import annotations

from pdd_runtime.frontend.reading import Part, Reader, overlap

OPEN, CLOSE = "<think>", "</think>"


def begins_inside(prompt: str) -> bool | None:
    """Whether the answer to `prompt` begins inside the reasoning, because the template has opened it; None: the
    template has closed it as well, so there is none."""
    tail = prompt.rstrip()
    return None if tail.endswith(CLOSE) else tail.endswith(OPEN)


class Thinking(Reader):
    """Splits the reasoning off; what follows it is another reader's. White space around the two is dropped."""

    def __init__(self, behind: Reader, *, inside: bool) -> None:
        """`inside`: the reasoning has begun already; else it begins if the text begins with `<think>`."""
        self._behind = behind
        self._state = "inside" if inside else "before"
        self._held = ""
        self._said = False
        """Some reasoning has gone out."""

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._held += text
        if self._state == "before":
            self._begin()
        if self._state == "inside":
            parts += self._think()
        if self._state == "between":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "behind"
        if self._state == "behind":
            rest, self._held = self._held, ""
            parts += self._behind.push(rest)
        return parts

    def flush(self) -> list[Part]:
        parts: list[Part] = []
        if self._state == "inside":
            parts = self._out(self._held.rstrip())
        elif self._state == "before":
            parts = self._behind.push(self._held)
        self._held = ""
        return parts + self._behind.flush()

    def _begin(self) -> None:
        head = self._held.lstrip()
        if head.startswith(OPEN):
            self._state, self._held = "inside", head[len(OPEN) :]
        elif not OPEN.startswith(head):
            self._state = "behind"

    def _think(self) -> list[Part]:
        at = self._held.find(CLOSE)
        if at >= 0:
            thought, self._held = self._held[:at].rstrip(), self._held[at + len(CLOSE) :]
            self._state = "between"
            return self._out(thought)
        sure = self._held[: len(self._held) - overlap(self._held, CLOSE)].rstrip()
        parts = self._out(sure)
        self._held = self._held[len(sure) :]
        return parts

    def _out(self, thought: str) -> list[Part]:
        if not self._said:
            thought = thought.lstrip()
        self._said = self._said or bool(thought)
        return [Part("reasoning", thought)] if thought else []
