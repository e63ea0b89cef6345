"""What llama.cpp has to say goes to Python's logging, and is quiet there unless something is wrong."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("pdd_llamacpp.llama")

MESSAGE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_INFO, _WARNING, _ERROR = 2, 3, 4
# It tells every tensor and every default as information, and warns of what is as it should be.
_LEVELS = {_INFO: logging.DEBUG, _WARNING: logging.DEBUG, _ERROR: logging.ERROR}


def _receive(level: int, text: bytes | None, _: int | None) -> None:
    """From any thread. Parts of lines, such as its progress dots, are dropped."""
    if level in _LEVELS and text and text.strip():
        log.log(_LEVELS[level], "%s", text.decode(errors="replace").strip())


receive = MESSAGE(_receive)
"""It must live as long as the library: that calls it at any time."""


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def complaints() -> Iterator[list[str]]:
    """The errors that llama.cpp tells of inside the block."""
    collector = _Collector()
    log.addHandler(collector)
    try:
        yield collector.lines
    finally:
        log.removeHandler(collector)
