"""Which recording a workload replays, and what is changed of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pdd_runtime.planner.traces import agent, azure, mooncake
from pdd_runtime.planner.traces.recorded import Recorded

FORMATS: dict[str, Callable[[Path], Iterator[Recorded]]] = {
    "mooncake": mooncake.read,
    "azure": azure.read,
    "agent": agent.read,
}


class Trace(BaseModel):
    """A recording, and what is changed of it. In short: `FORMAT:FILE`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    format: Literal["mooncake", "azure", "agent"]
    """`mooncake` (JSON lines with block ids), `azure` (CSV without), or `agent` (sessions of coding agents: JSON files
    of kv-cache-tester, a directory of them, or a table)."""
    file: str = Field(min_length=1)
    """Plain, or gzipped as `.gz`; relative to the workload's file."""
    requests: int | None = Field(default=None, ge=1)
    """Only the first so many."""
    scale: float = Field(default=1.0, gt=0, le=1000, allow_inf_nan=False)
    """All lengths times this, what prompts have in common too: real shapes for a small model."""
    longest_prompt: int | None = Field(default=None, ge=2)
    """Longer prompts are cut to so many tokens."""
    longest_output: int | None = Field(default=None, ge=1)
    """The same of answers."""
    longest_think: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Seconds; longer pauses within a session are cut."""

    @staticmethod
    def parse(value: Any) -> Any:
        """The short form as a mapping; anything else as it is."""
        if not isinstance(value, str):
            return value
        name, colon, file = value.partition(":")
        if not colon or name not in FORMATS:
            raise ValueError(f"write it as FORMAT:FILE, where the format is {', '.join(FORMATS)}")
        return {"format": name, "file": file}

    def beside(self, directory: Path) -> Trace:
        """The same with its file's path from here."""
        return self.model_copy(update={"file": str(directory / Path(self.file).expanduser())})

    def recorded(self) -> Iterator[Recorded]:
        """Unchanged but for `requests`. Raises `WorkloadError`."""
        left = self.requests
        for session in FORMATS[self.format](Path(self.file)):
            if left is not None:
                session = session._replace(requests=session.requests[:left])
                left -= len(session.requests)
            yield session
            if left == 0:
                return

    @property
    def has_times(self) -> bool:
        """Whether it was recorded when sessions began."""
        return self.format != "agent"

    @property
    def has_content(self) -> bool:
        """Whether it was recorded what prompts had in common."""
        return self.format != "azure"
