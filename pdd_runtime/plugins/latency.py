"""The latency contract: how long a worker computes, told by a pure object."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from pydantic import BaseModel


class LatencyModel(ABC):
    """How long one worker's forward passes take. Pure once it is made: no I/O, no clock, no state. The constructor may
    read files and compute tables; it raises `PddError` where it cannot know."""

    name: ClassVar[str]
    Config: ClassVar[type[BaseModel]]

    def __init__(self, config: BaseModel) -> None:
        self.config = config

    @abstractmethod
    def prefill(self, new: int, context: int) -> float:
        """Seconds of one forward pass over `new` (>= 1) tokens of one sequence behind `context` (>= 0) known ones: of a
        chunk of a prompt, or an extend."""

    @abstractmethod
    def decode(self, batch: int, context: float) -> float:
        """Seconds of one decode step of `batch` (>= 1) sequences that have `context` (>= 0) tokens on average."""

    @property
    @abstractmethod
    def source(self) -> str:
        """Where its answers come from, in one line, for reports."""
