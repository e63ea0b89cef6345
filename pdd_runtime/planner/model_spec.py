"""Models by what decides how long a pass takes and how large their KV is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from pdd_runtime.planner.figures import Figures, find, merged, packaged

_TABLE = "models.yaml"


class ModelFigures(Figures):
    """One model. `like: NAME` takes what is not said from a model that is known."""

    parameters: float = Field(gt=0)
    """All of them."""
    active: float | None = Field(default=None, gt=0)
    """Those that a token goes through; none: all."""
    weight_bytes: float = Field(default=2.0, gt=0)
    """Bytes of a parameter in memory, on average."""
    compute: Literal["bfloat16", "fp8"] = "bfloat16"
    """The numbers it is computed in."""
    layers: int = Field(ge=1)
    """One after another."""
    hidden: int = Field(ge=1)
    """Numbers of a token between layers."""
    experts: int = Field(default=1, ge=1)
    """Routed experts of a layer; 1: a dense model."""
    experts_active: int = Field(default=1, ge=1)
    """Those of them that a token goes to."""
    attention: float = Field(ge=0)
    """FLOPs for each pair of a token and one that it attends to, in all layers."""
    attention_decode: float | None = Field(default=None, ge=0)
    """The same in decoding, where its kernels compute otherwise."""
    attends: int | None = Field(default=None, ge=1)
    """The most tokens that a token attends to; none: all before it."""
    index: float = Field(default=0.0, ge=0)
    """FLOPs for each pair of a token and any before it: what chooses those that are attended to."""
    kv_token: float = Field(gt=0)
    """Bytes of KV for each token."""
    kv_constant: float = Field(default=0.0, ge=0)
    """Bytes of KV for each request, beside those for its tokens."""
    kv_bits: Literal[8, 16, 32] = 16
    """Of a number in that KV."""
    context_length: int | None = Field(default=None, ge=1)
    """Tokens of its longest sequence, prompt and answer together; none: not known, and nothing is refused for it."""

    @model_validator(mode="before")
    @classmethod
    def _like(cls, value: Any) -> Any:
        return merged(value, _TABLE)

    @model_validator(mode="after")
    def _fits(self) -> ModelFigures:
        if self.experts_active > self.experts:
            raise ValueError("experts_active is above experts")
        if self.active is not None and self.active > self.parameters:
            raise ValueError("active is above parameters")
        if self.experts > 1 and self.dense < 0:
            raise ValueError("active is too small for experts_active of its experts")
        return self

    @property
    def each_token(self) -> float:
        """Parameters that a token goes through."""
        return self.parameters if self.active is None else self.active

    @property
    def routed(self) -> float:
        """Parameters of all routed experts: with `dense` beside them, `active` is what a token goes through."""
        spared = 1 - self.experts_active / self.experts
        return (self.parameters - self.each_token) / spared if spared else 0.0

    @property
    def dense(self) -> float:
        """Parameters that every token goes through."""
        return self.parameters - self.routed

    @property
    def weights(self) -> float:
        """Bytes of all its parameters."""
        return self.parameters * self.weight_bytes

    def kv(self, bits: int) -> tuple[float, float]:
        """(constant, per token) bytes of its KV with numbers of `bits` bits."""
        return self.kv_constant * bits / self.kv_bits, self.kv_token * bits / self.kv_bits


def known_models() -> dict[str, ModelFigures]:
    """The models that need no figures, by name."""
    return packaged(ModelFigures, _TABLE)


def model_figures(name: str, own: Mapping[str, ModelFigures] | None = None) -> ModelFigures:
    """Of the model that a graph calls `name`: `deepseek-v3`, or as its publisher writes it, `deepseek-ai/DeepSeek-V3`.
    `-Instruct` makes no difference.
    `own`: models beside those that are known. Raises `FigureError`."""
    if own and name in own:
        return own[name]
    plain = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-").removesuffix("-instruct")
    return find(ModelFigures, _TABLE, "model", plain, own)
