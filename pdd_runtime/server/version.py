"""Which versions of a server an engine plugin drives."""

from __future__ import annotations

from collections.abc import Sequence

from pdd_runtime.errors import EngineError


def check_tried(engine: str, version: str, tried: Sequence[str], where: str) -> None:
    """Raises `EngineError` where `version` begins with none of `tried`: an interface that moves from release to release
    is used as it was seen."""
    if not version.startswith(tuple(tried)):
        raise EngineError(
            f"{engine} {version or 'of an unknown version'} was not tried with this plugin",
            where=where,
            why=f"what its connector leans on moves with its versions; tried: {', '.join(tried)}",
            fix="install one of these where the server runs",
        )
