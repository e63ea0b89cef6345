"""Prepared weights on disk: made once per model and dtype, then mapped, so that workers share their pages."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import platformdirs
import torch
from filelock import FileLock
from torch import Tensor

from pdd_runtime.models.source import hash_files
from pdd_torch.source import Source
from pdd_torch.weights import FORM, prepare

log = logging.getLogger(__name__)

_SMALLEST = 32 * 2**20
"""Preparing a model smaller than this takes no time worth a file."""


def load(
    source: Source, digest: str, dtype: torch.dtype, *, root: Path | None = None, smallest: int = _SMALLEST
) -> dict[str, Tensor]:
    """The prepared tensors, from the cache or made now. Safe for several processes at once: one makes, the others
    wait. An entry that is damaged is made again. A model of less than `smallest` bytes is not cached."""
    if source.bytes < smallest:
        return prepare(source, dtype)
    root = root or platformdirs.user_cache_path("pdd-runtime") / "torch"
    entry = root / f"{digest}-{str(dtype).removeprefix('torch.')}-{FORM}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock"):
            cached = _read(entry)
            if cached is None:
                _write(entry, prepare(source, dtype))
                cached = _read(entry)
            if cached is not None:
                return cached
    except OSError as error:
        log.warning("weights cannot be cached in %s (%s): this start, and every one, makes them anew", root, error)
    return prepare(source, dtype)


def _read(entry: Path) -> dict[str, Tensor] | None:
    if not entry.exists():
        return None
    try:
        if hash_files([entry / "weights.pt"]) == (entry / "checksum").read_text():
            tensors: dict[str, Tensor] = torch.load(entry / "weights.pt", mmap=True, weights_only=True)
            return tensors
        why = "its checksum is wrong"
    except Exception as error:  # whatever a damaged file makes of the reader
        why = str(error)
    log.warning("cached weights %s are damaged (%s): made again", entry, why)
    return None


def _write(entry: Path, tensors: dict[str, Tensor]) -> None:
    fresh = entry.with_suffix(".new")
    for path in (fresh, entry):
        shutil.rmtree(path, ignore_errors=True)
    fresh.mkdir()
    torch.save(tensors, fresh / "weights.pt")
    (fresh / "checksum").write_text(hash_files([fresh / "weights.pt"]))
    fresh.rename(entry)  # whole or not at all
