"""Text files of recordings, plain or gzipped, line by line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from pdd_runtime.planner.workload_error import WorkloadError

T = TypeVar("T")
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
LONGEST = 1 << 24
"""Bytes of a line."""
LARGEST = 1 << 28
"""Bytes of a file that is read at once."""


def lines(path: Path) -> Iterator[bytes]:
    """Raises `WorkloadError`."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while line := file.readline(LONGEST + 1):
                if len(line) > LONGEST:
                    raise WorkloadError("a line of the trace is too long", where=str(path), why=f"over {LONGEST} bytes")
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error


def whole(path: Path) -> bytes:
    """All of a file. Raises `WorkloadError`."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    if len(data) > LARGEST:
        raise WorkloadError("the trace is too large", where=str(path), why=f"over {LARGEST} bytes in one file")
    return data


def decoded(decoder: msgspec.json.Decoder[T], data: bytes, where: str, form: str) -> T:
    """JSON as what `decoder` knows. `form`: what would be right. Raises `WorkloadError`."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise wrong(where, str(error), form) from error


def wrong(where: str, why: str, form: str) -> WorkloadError:
    return WorkloadError("the trace has another form", where=where, why=why, fix=f"it should be {form}")


def _unreadable(path: Path, error: Any) -> WorkloadError:
    return WorkloadError(
        "the trace cannot be read",
        where=str(path),
        why=getattr(error, "strerror", None) or str(error),
        fix="name the file, plain or as .gz; a relative path begins at the workload's file",
    )
