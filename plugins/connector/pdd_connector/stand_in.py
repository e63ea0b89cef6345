"""This package for another environment's interpreter."""

from __future__ import annotations

from pathlib import Path


def source() -> str:
    """The text of a package's `__init__.py` that finds the modules of this one where they are installed. A server that
    has it on its path loads the release that its worker has, and nothing else of the worker's environment."""
    return f"__path__ = {[str(Path(__file__).resolve().parent)]!r}\n"
