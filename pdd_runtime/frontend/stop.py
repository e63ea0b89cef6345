"""Stop strings, wherever the tokens that spell them are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pdd_runtime.frontend.reading import overlap


class Found(NamedTuple):
    """What one push lets out, and whether a stop string was completed (then nothing more comes)."""

    text: str
    stopped: bool


class StopStrings:
    """Lets text through up to, and without, the first stop string to be completed.

    The answer does not depend on how the text is cut into pieces. Text is held back only while it could
    still be the beginning of a stop string. Where two stop strings end at the same character, the longer
    one is cut off.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none of them empty."""
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Found:
        text = self._held + text
        cut = self._first(text)
        if cut is not None:
            self._held = ""
            return Found(text[:cut], True)
        keep = len(text) - self._pending(text)
        self._held = text[keep:]
        return Found(text[:keep], False)

    def flush(self) -> str:
        """The text still held back when the answer ends otherwise."""
        text, self._held = self._held, ""
        return text

    def _first(self, text: str) -> int | None:
        """Where the stop string that is completed first begins."""
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(hits)[1] if hits else None

    def _pending(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        return max(overlap(text, stop) for stop in self._stops)
