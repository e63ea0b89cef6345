"""Log lines of several processes: taken apart, put in order, chosen by request."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_HEAD = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d+) (?P<level>[A-Z]+) (?:(?P<logger>[\w.]+): )?(?P<message>.*)"
)


@dataclass(frozen=True)
class LogLine:
    """One line that a process wrote."""

    process: str
    """`POOL/INDEX`, or `launcher`."""
    text: str
    time: str
    """Of this line, or of the one that it goes on: a traceback has no times. It sorts as it reads."""
    head: bool
    """It begins an entry."""

    def json(self) -> dict[str, str | None]:
        found = _HEAD.fullmatch(self.text) if self.head else None
        return {
            "process": self.process,
            "time": self.time or None,
            "level": found["level"] if found else None,
            "logger": found["logger"] if found else None,
            "message": found["message"] if found else self.text,
        }


class Lines:
    """The lines of one process, each with its time."""

    def __init__(self, process: str) -> None:
        self._process, self._time = process, ""

    def take(self, texts: Iterable[str]) -> Iterator[LogLine]:
        for text in texts:
            found = _HEAD.fullmatch(text)
            if found:
                self._time = found["time"]
            yield LogLine(self._process, text, self._time, found is not None)


class OfRequest:
    """Keeps what is about one request: entries that name it, with all their lines."""

    def __init__(self, request: str) -> None:
        # An answer of several choices has ids of its own for each: ID-1, ID-2.
        self._name = re.compile(rf"(?<![\w-]){re.escape(request)}(?!\w)")
        self._inside: dict[str, bool] = {}

    def __call__(self, line: LogLine) -> bool:
        named = bool(self._name.search(line.text))
        # What has no time of its own goes on: a traceback, an error's why and fix. A remark of the launcher does not.
        if line.head or line.text.startswith("launcher: "):
            self._inside[line.process] = named
        return named or self._inside.get(line.process, False)
