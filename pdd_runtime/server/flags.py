"""Which flag a word of a server's command line sets."""

from __future__ import annotations

from collections.abc import Iterable


def flag_of(word: str, flags: Iterable[str]) -> str | None:
    """The one of `flags` that `word` sets, however servers let it be written: `--port=1`, `--por`, `--block_size`, and
    `--kv-transfer-config.kv_role` for a part of it. None where it is another flag, or a value."""
    name = word.partition("=")[0]
    if name.startswith("--"):
        name = name.partition(".")[0].replace("_", "-")
    known = tuple(flags)
    if name in known:
        return name
    # argparse takes the beginning of a flag for the whole of it.
    begun = name.startswith("-") and name.strip("-")
    return next((flag for flag in known if begun and flag.startswith(name)), None)
