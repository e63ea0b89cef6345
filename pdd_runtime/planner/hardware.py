"""Chips by their four figures (compute, memory, its bandwidth, interconnect), and how well they do in each phase."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, model_validator

from pdd_runtime.graph.units import ByteRate, ComputingRate, Size
from pdd_runtime.planner.figures import FigureError, Figures, find, merged, packaged

_TABLE = "hardware.yaml"
_COUNTED = re.compile(r"^((?:\d{1,4}x){0,3})([a-z].*)$")


class Hardware(Figures):
    """One chip. `like: NAME` takes what is not said from a chip that is known."""

    compute: ComputingRate = Field(gt=0)
    """Dense, with 16-bit numbers."""
    compute_fp8: ComputingRate | None = Field(default=None, gt=0)
    """The same with 8-bit numbers; none: it computes those as 16-bit ones."""
    memory: Size = Field(gt=0)
    """Of the chip, e.g. `80GB`."""
    bandwidth: ByteRate = Field(gt=0)
    """Of its memory, e.g. `3.35TB/s`."""
    interconnect: ByteRate = Field(gt=0)
    """To the other chips of its node, in one direction."""
    network: ByteRate = Field(gt=0)
    """To other nodes, in one direction."""
    node: int = Field(default=8, ge=1)
    """Chips of a node."""
    power: float | None = Field(default=None, gt=0)
    """Watts of the chip at full load, for the price of energy."""
    prefill: float = Field(default=1.0, gt=0)
    """How fast it prefills for what its figures promise, where it was compared with others: 0.5 is half as fast."""
    decode: float = Field(default=1.0, gt=0)
    """The same of decoding."""

    @model_validator(mode="before")
    @classmethod
    def _like(cls, value: Any) -> Any:
        return merged(value, _TABLE)


@dataclass(frozen=True, slots=True)
class Machine:
    """What one worker computes on."""

    name: str
    """As it was written: `8xh100`."""
    chip: Hardware
    chips: int

    @property
    def nodes(self) -> float:
        """Nodes of `chip.node` chips; a part of one where it has fewer."""
        return self.chips / self.chip.node

    @property
    def memory(self) -> int:
        """Bytes of all its chips."""
        return self.chips * self.chip.memory


def known_hardware() -> dict[str, Hardware]:
    """The chips that need no figures, by name."""
    return packaged(Hardware, _TABLE)


def machine(name: str, own: Mapping[str, Hardware] | None = None) -> Machine:
    """What `hardware: NAME` of a pool says each of its workers has: `h100`, `8xh100`, `4x8xh100` (four nodes of eight).
    `own`: chips beside those that are known. Raises `FigureError`."""
    chips, chip = counted(name)
    return Machine(name, find(Hardware, _TABLE, "chip", chip, own), chips)


def counted(name: str) -> tuple[int, str]:
    """How many of which chip `name` says: (32, "h100") of `4x8xh100`. Raises `FigureError`."""
    match = _COUNTED.match(name.lower())
    if match is None:
        raise FigureError(f'"{name}" is no hardware', fix="write it like h100, 8xh100 or 4x8xh100")
    chips = math.prod(int(count) for count in match[1].split("x")[:-1])
    if not chips:
        raise FigureError(f'"{name}" has no chips', fix="write it like 8xh100")
    return chips, match[2]
