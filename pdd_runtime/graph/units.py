"""Quantities as people write them: `200Mbit/s`, `50ms`, `8GB`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

_NUMBER = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-z/]*)\s*$")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_BITS = {"bit/s": 1.0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9}
_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def _parse(value: object, units: dict[str, float], kind: str) -> float:
    match = _NUMBER.match(value) if isinstance(value, str) else None
    if not match or match[2] not in units:
        raise ValueError(f"{value!r} is not a {kind}: write a number and one of {', '.join(units)}")
    return float(match[1]) * units[match[2]]


def _duration(value: object) -> object:
    return _parse(value, _SECONDS, "duration")


def _bandwidth(value: object) -> object:
    return _parse(value, _BITS, "bandwidth")


def _size(value: object) -> object:
    return int(_parse(value, {k: float(v) for k, v in _BYTES.items()}, "size"))


Duration = Annotated[float, BeforeValidator(_duration)]
"""Seconds, written `50ms`, `10s`."""
Bandwidth = Annotated[float, BeforeValidator(_bandwidth)]
"""Bits per second, written `200Mbit/s`, `10Gbit/s`."""
Size = Annotated[int, BeforeValidator(_size)]
"""Bytes, written `512MiB`, `8GB`."""
