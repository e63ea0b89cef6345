"""The engine: what all in-process engines are, around a model in torch."""

from __future__ import annotations

from typing import ClassVar

from msgspec import structs
from pydantic import BaseModel

from pdd_runtime.inprocess import InProcessEngine, Runner
from pdd_runtime.plugins.engine import Capabilities, ModelSpec


class TorchEngine(InProcessEngine):
    name: ClassVar[str] = "torch"

    @classmethod
    def promises(cls, model: ModelSpec, config: BaseModel) -> Capabilities:
        return structs.replace(super().promises(model, config), exact=model.mode == "exact")

    def _load(self) -> Runner:
        # Importing torch takes seconds, and a process that only lists plugins needs none of it.
        from pdd_torch.runner import TorchRunner

        return TorchRunner(self.config, self.model)
