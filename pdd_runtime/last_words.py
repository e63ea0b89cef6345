"""What a process wrote before it ended, and which of it says why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

TRACEBACK = "Traceback (most recent call last):"
_MORE = ("  why: ", "  fix: ")
"""How the lines of an error of ours begin that follow its first."""
_ERROR = re.compile(
    r"\b(ERROR|CRITICAL|FATAL)\b|^terminate called|^\s*what\(\):|^(\w+\.)*\w+(Error|Exception): |\b[Ee]rror: |^Killed$"
    r"|Segmentation fault"
)


def telling(written: Iterable[str]) -> str:
    """The last error of ours; else how the first traceback ends, which those behind it only follow; else the first line
    that tells of an error, or the last of all. Empty where nothing was written."""
    lines = [line for line in written if line.strip()]
    if not lines:
        return ""
    found = _ours(lines)
    if found is None:
        found = _traceback(lines)
    if found is None:
        found = next((n for n, line in enumerate(lines) if _ERROR.search(line)), len(lines) - 1)
    return " — ".join(line.strip() for line in (lines[found], *_following(lines[found + 1 :])))


def _ours(lines: Sequence[str]) -> int | None:
    """The number of the line that the last of them begins with."""
    for number in reversed(range(1, len(lines))):
        if lines[number].startswith(_MORE) and not lines[number - 1].startswith(_MORE):
            return number - 1
    return None


def _traceback(lines: Sequence[str]) -> int | None:
    """The number of the line that the first traceback ends with. Every line may have a beginning of its logger's."""
    for start, line in enumerate(lines):
        before = line.find(TRACEBACK)
        if before >= 0:
            for number in range(start + 1, len(lines)):
                text = lines[number][before:]
                if text and not text[0].isspace() and not text.startswith(("|", "+")):
                    return number
    return None


def _following(lines: Sequence[str]) -> list[str]:
    end = next((n for n, line in enumerate(lines) if not line.startswith(_MORE)), len(lines))
    return list(lines[:end])
