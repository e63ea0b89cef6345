"""The engine `llamacpp`: what all in-process engines share, around llama.cpp."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel

from pdd_llamacpp.config import LlamaCppConfig
from pdd_runtime.errors import EngineError
from pdd_runtime.inprocess import InProcessEngine, Runner


class LlamaCppEngine(InProcessEngine):
    name: ClassVar[str] = "llamacpp"
    Config: ClassVar[type[BaseModel]] = LlamaCppConfig
    config: LlamaCppConfig

    def _load(self) -> Runner:
        if self.model.mode == "exact":
            raise EngineError(
                "mode: exact is more than llama.cpp can do",
                where="spec.model.mode",
                why="its arithmetic depends on what else is in a batch, so a handoff may change a token",
                fix="use mode: fast, or the engine torch in every pool",
            )
        # The library is not needed to list plugins.
        from pdd_llamacpp.runner import LlamaCppRunner

        return LlamaCppRunner(self.config, self.model)
