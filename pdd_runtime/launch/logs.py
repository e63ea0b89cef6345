"""The log of one process: bounded on disk, read back by line."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator
from io import FileIO, TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import BinaryIO

from pdd_runtime.hiding import HIDDEN, to_hide

log = logging.getLogger(__name__)

MAX_BYTES = 8 << 20
"""Then the file is put aside as `….log.1`, whose predecessor goes."""
MAX_LINE = 16 << 10


class LogFile:
    """Appends lines, and remembers the last ones. Writes go to the page cache: they do not block for long."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, *, hide: Iterable[str] = ()) -> None:
        """`hide`: what is not to be seen here, whoever writes it."""
        self.path = path
        self.tail: deque[str] = deque(maxlen=30)
        self.trouble = ""
        """Why lines are lost now; empty: none are."""
        self._hide = [line.encode() for line in to_hide(hide)]
        self._max_bytes = max_bytes
        self._file: FileIO | None = None
        self._size = 0
        self._rest = b""
        self._lost = 0
        """Lines."""
        self._torn = False
        """The last line is there in part."""

    def feed(self, data: bytes) -> list[str]:
        """Take what the process wrote and return the lines that are whole now. A longer line than `MAX_LINE` is
        taken in pieces."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        while len(self._rest) > MAX_LINE:
            lines.append(self._rest[:MAX_LINE])
            self._rest = self._rest[MAX_LINE:]
        return [self._append(line) for line in lines]

    def flush(self) -> list[str]:
        """The process has ended: a line without its end is whole, too."""
        rest, self._rest = self._rest, b""
        return [self._append(rest)] if rest else []

    def write(self, line: str) -> None:
        """A line of the launcher's own."""
        self._append(line.encode())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _append(self, line: bytes) -> str:
        for secret in self._hide:
            line = line.replace(secret, HIDDEN.encode())
        # What cannot be written is lost: a full disk must not end what runs.
        try:
            self._write(line)
        except OSError as error:
            self._lost += 1
            if not self.trouble:
                self.trouble = f"its log cannot be written: {error.strerror or error}"
                log.warning("%s: lines are lost: %s", self.path, error.strerror or error)
        text = line.decode(errors="replace").rstrip("\r")
        self.tail.append(text)
        return text

    def _write(self, line: bytes) -> None:
        if self._file is None or self._size + len(line) > self._max_bytes:
            self._open()
        if self._lost:
            self._put(b"launcher: %d lines could not be written here\n" % self._lost)
            log.warning("%s: it is written again; %d lines are lost", self.path, self._lost)
            self._lost, self.trouble = 0, ""
        self._put(line + b"\n")

    def _put(self, data: bytes) -> None:
        """Without a buffer, which would keep what the disk does not take, and fail again when it is closed."""
        assert self._file is not None
        left = b"\n" + data if self._torn else data
        while left:
            written = self._file.write(left) or 0
            self._size += written
            left = left[written:]
            self._torn = bool(left)

    def _open(self) -> None:
        self.close()
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size + MAX_LINE > self._max_bytes:
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
            self._torn = False
        self._file = FileIO(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab")
        self._size = self._file.tell()


class LauncherLog(RotatingFileHandler):
    """What the launcher itself has to say, bounded like all else, and for the user alone."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=1, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def _open(self) -> TextIOWrapper:
        file = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return TextIOWrapper(os.fdopen(file, "ab"), encoding="utf-8", errors="replace")


class LogReader:
    """Reads a log that grows, and goes on in the next file when it is put aside."""

    def __init__(self, path: Path, lines: int) -> None:
        """Begins `lines` lines before the end."""
        self.path = path
        self._file: BinaryIO | None = None
        self._rest = b""
        self._first: deque[str] | None = deque(maxlen=lines)

    def read(self) -> Iterator[str]:
        """The lines since the last call."""
        if self._first is not None:
            last, self._first = self._first, None
            last.extend(self._new())
            yield from last
        else:
            yield from self._new()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _new(self) -> Iterator[str]:
        if self._file is None:
            try:
                self._file = self.path.open("rb")
            except FileNotFoundError:
                return
        yield from self._lines(self._file)
        try:
            moved = self.path.stat().st_ino != self._inode()
        except FileNotFoundError:
            return
        if moved:
            yield from self._lines(self._file)
            self._file.close()
            self._file = self.path.open("rb")
            yield from self._lines(self._file)

    def _inode(self) -> int:
        assert self._file is not None
        return os.fstat(self._file.fileno()).st_ino

    def _lines(self, file: BinaryIO) -> Iterator[str]:
        while data := file.read(1 << 16):
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace").rstrip("\r")
