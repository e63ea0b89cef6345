"""Grids that took long to make, kept on disk from one run to the next."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import platformdirs
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from pdd_runtime.planner.latency.table import Grid

log = logging.getLogger(__name__)

ROOT = "PDD_CACHE_DIR"
"""Environment: where caches are, instead of the user's."""
_LARGEST = 4 << 20
"""Bytes of a file that is read."""


class Grids(BaseModel):
    """Those of one latency model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefill: Grid
    decode: Grid


class GridCache:
    """Of one set of settings. What cannot be read, or written, counts as not there."""

    def __init__(self, origin: str, settings: Mapping[str, Any]) -> None:
        """`origin`: what makes the grids, with its version."""
        key = json.dumps([origin, settings], sort_keys=True)
        root = Path(os.environ.get(ROOT) or platformdirs.user_cache_path("pdd-runtime"))
        self.file = root / "latency" / f"{xxhash.xxh3_128_hexdigest(key.encode())}.json"

    def read(self) -> Grids | None:
        try:
            if self.file.stat().st_size > _LARGEST:
                return None
            return Grids.model_validate_json(self.file.read_bytes())
        except (OSError, ValidationError):
            return None

    def write(self, grids: Grids) -> None:
        fresh = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh.write_text(grids.model_dump_json(), encoding="utf-8")
            fresh.replace(self.file)
        except OSError as error:
            log.warning("latencies cannot be kept in %s: %s", self.file, error)
