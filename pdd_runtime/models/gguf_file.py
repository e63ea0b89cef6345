"""The head of a GGUF file: metadata and where each tensor lies.

The `gguf` package reads it as well, in seconds; this takes a tenth of one, at every start of every worker. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

from pdd_runtime.errors import EngineError

_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Value types as `struct` writes them."""
_STRING, _ARRAY = 8, 9


class Place(NamedTuple):
    """Where one tensor lies."""

    kind: int
    """GGML's number of its number format."""
    shape: tuple[int, ...]
    """Outermost dimension first."""
    offset: int
    """From the start of the file, in bytes."""


class GgufFile:
    """Raises `EngineError` for a file that is none, or is cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, Place] = {}
        try:
            with path.open("rb") as file:
                self._read = file.read
                magic, version, tensors, fields = struct.unpack("<4sIQQ", file.read(24))
                if magic != b"GGUF" or version not in (2, 3):
                    raise ValueError(f"it begins with {magic!r} version {version}")
                for _ in range(fields):
                    name = self._string()
                    self.metadata[name] = self._value(self._number("I"))
                places = [self._place() for _ in range(tensors)]
                alignment = self.metadata.get("general.alignment", 32)
                start = -(-file.tell() // alignment) * alignment
        except (OSError, ValueError, KeyError, struct.error, OverflowError, MemoryError) as error:
            raise EngineError("not a whole GGUF file", where=str(path), why=str(error)) from error
        self.tensors = {name: place._replace(offset=start + place.offset) for name, place in places}

    def _number(self, code: str) -> Any:
        return struct.unpack(f"<{code}", self._read(struct.calcsize(f"<{code}")))[0]

    def _string(self) -> str:
        length = self._number("Q")
        data = self._read(length)
        if len(data) < length:
            raise ValueError("it ends within a string")
        return data.decode()

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_NUMBERS[kind])
        kind, count = self._number("I"), self._number("Q")
        if kind in (_STRING, _ARRAY):
            return [self._value(kind) for _ in range(count)]
        code = f"<{count}{_NUMBERS[kind]}"
        return list(struct.unpack(code, self._read(struct.calcsize(code))))

    def _place(self) -> tuple[str, Place]:
        name = self._string()
        shape = tuple(self._number("Q") for _ in range(self._number("I")))
        return name, Place(self._number("I"), shape[::-1], self._number("Q"))
