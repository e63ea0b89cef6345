"""Prepared weights on disk: made once per model and dtype, then mapped, so that workers share their pages."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import platformdirs
import torch
import xxhash
from filelock import FileLock
from torch import Tensor

from pdd_torch.source import Source
from pdd_torch.weights import FORM, prepare

log = logging.getLogger(__name__)


def load(source: Source, digest: str, dtype: torch.dtype, root: Path | None = None) -> dict[str, Tensor]:
    """The prepared tensors, from the cache or made now. Safe for several processes at once: one makes, the others
    wait. An entry that is damaged is made again."""
    root = root or platformdirs.user_cache_path("pdd-runtime") / "torch"
    root.mkdir(parents=True, exist_ok=True)
    entry = root / f"{digest}-{str(dtype).removeprefix('torch.')}-{FORM}"
    with FileLock(f"{entry}.lock"):
        tensors = _read(entry)
        if tensors is None:
            _write(entry, prepare(source, dtype))
            tensors = _read(entry)
    if tensors is None:
        raise OSError(f"{entry} cannot be read back")
    return tensors


def _read(entry: Path) -> dict[str, Tensor] | None:
    if not entry.exists():
        return None
    try:
        if _checksum(entry / "weights.pt") == (entry / "checksum").read_text():
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
    (fresh / "checksum").write_text(_checksum(fresh / "weights.pt"))
    fresh.rename(entry)  # whole or not at all


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()
