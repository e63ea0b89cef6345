"""Azure's LLM inference traces: CSV with TIMESTAMP, ContextTokens and GeneratedTokens. What prompts had in common was
not recorded."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from pdd_runtime.planner.traces.recorded import Asked, Recorded
from pdd_runtime.planner.traces.table import rows, wrong_row

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(path: Path) -> Iterator[Recorded]:
    """Each request is a session of its own."""
    begun: datetime | None = None
    for where, (time, prompt, output) in rows(path, COLUMNS):
        try:
            at = datetime.fromisoformat(time)
            begun = begun or at
            seconds = (at - begun).total_seconds()
            asked = Asked(max(1, int(prompt)), max(1, int(output)), 0.0, None)
        except (ValueError, TypeError) as error:
            raise wrong_row(where, error, COLUMNS) from error
        yield Recorded(seconds, (asked,))
