"""Quantities as people write them: `200Mbit/s`, `50ms`, `8GB`."""

from __future__ import annotations

import math
import re
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_NUMBER = re.compile(r"^\s*(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*([A-Za-z/]*)\s*$", re.ASCII)
_LOOSE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([A-Za-zµ/]+)\s*$")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_BITS = {"bit/s": 1.0, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9}
_RATES = {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}
_FLOPS = {"FLOP/s": 1.0, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
_EXAMPLES = {
    "duration": "50ms",
    "bandwidth": "200Mbit/s",
    "size": "2GiB",
    "byte rate": "3.35TB/s",
    "computing rate": "989TFLOP/s",
}
_BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}


def _spellings(unit: str) -> tuple[str, ...]:
    """Of a bandwidth: `Mbit/s` as mbps, mb/s, mbit, mbits, mbits/s."""
    short = unit.lower().removesuffix("bit/s")
    return tuple(f"{short}{rest}" for rest in ("bps", "b/s", "bit", "bits", "bits/s"))


_ALIASES = {
    **{alias: unit for unit in _BITS for alias in _spellings(unit)},
    **dict.fromkeys(("sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("msec", "msecs", "millis", "milliseconds"), "ms"),
    **dict.fromkeys(("usec", "µs", "microseconds"), "us"),
    **dict.fromkeys(("m", "mins", "minute", "minutes"), "min"),
}
"""Other spellings that are clear, in lower case."""


class UnitError(ValueError):
    """Not a quantity. `fix` is what was probably meant, or an example."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


def _parse(value: object, units: dict[str, float], kind: str) -> float:
    match = _NUMBER.match(value) if isinstance(value, str) else None
    if not match or match[2] not in units:
        why = f"{value!r} is not a {kind}: write a number and one of {', '.join(units)}"
        raise UnitError(why, _meant(value, units) or f'write it like "{_EXAMPLES[kind]}"')
    number = float(match[1]) * units[match[2]]
    if not math.isfinite(number):
        raise UnitError(f"{value!r} is not a {kind}: the number is too large", "write a smaller one")
    return number


def _meant(value: object, units: dict[str, float]) -> str:
    match = _LOOSE.match(value) if isinstance(value, str) else None
    if not match:
        return ""
    number, unit = match[1], match[2]
    if unit in ("MB/s", "GB/s", "kB/s") and "bit/s" in units:
        return f'did you mean "{float(number) * 8:g}{unit[0]}bit/s"? Bandwidths are in bits'
    exact = next((known for known in units if known.lower() == unit.lower()), _ALIASES.get(unit.lower(), ""))
    return f'did you mean "{number}{exact}"?' if exact in units else ""


def _write(value: float, units: dict[str, float], base: str) -> str:
    """The shortest spelling that is read back as exactly `value`."""
    spellings = [f"{value / factor:.15g}{unit}" for unit, factor in units.items()]
    exact = [text for text in spellings if _parse(text, units, "quantity") == value]
    return min(exact, key=len) if exact else f"{value!r}{base}"


def _duration(value: object) -> object:
    return _parse(value, _SECONDS, "duration")


def _bandwidth(value: object) -> object:
    return _parse(value, _BITS, "bandwidth")


def _size(value: object) -> object:
    return int(_parse(value, _BYTES, "size"))


def _byte_rate(value: object) -> object:
    return _parse(value, _RATES, "byte rate")


def _computing_rate(value: object) -> object:
    return _parse(value, _FLOPS, "computing rate")


def write_duration(seconds: float) -> str:
    """`0.05` as `50ms`."""
    return _write(seconds, _SECONDS, "s")


def write_bandwidth(bits_per_second: float) -> str:
    """`2e8` as `200Mbit/s`."""
    return _write(bits_per_second, _BITS, "bit/s")


def write_size(size: int) -> str:
    """`2**20` as `1MiB`."""
    return _write(float(size), _BYTES, "B")


def write_byte_rate(bytes_per_second: float) -> str:
    """`8.64e11` as `864GB/s`."""
    return _write(bytes_per_second, _RATES, "B/s")


def write_computing_rate(flops: float) -> str:
    """`9.89e14` as `989TFLOP/s`."""
    return _write(flops, _FLOPS, "FLOP/s")


def _form(kind: str, units: dict[str, float]) -> WithJsonSchema:
    """What an editor is told."""
    pattern = rf"^\s*\d+(\.\d+)?(e[+-]?\d+)?\s*({'|'.join(units)})\s*$"
    about = f"A {kind}: a number and one of {', '.join(units)}."
    return WithJsonSchema({"type": "string", "pattern": pattern, "examples": [_EXAMPLES[kind]], "description": about})


# Written with their units in JSON, too: what a worker is given reads and validates like the YAML.
Duration = Annotated[
    float,
    BeforeValidator(_duration),
    PlainSerializer(write_duration, str, "json"),
    _form("duration", _SECONDS),
]
"""Seconds, written `50ms`, `10s`."""
Bandwidth = Annotated[
    float,
    BeforeValidator(_bandwidth),
    PlainSerializer(write_bandwidth, str, "json"),
    _form("bandwidth", _BITS),
]
"""Bits per second, written `200Mbit/s`, `10Gbit/s`."""
Size = Annotated[
    int,
    BeforeValidator(_size),
    PlainSerializer(write_size, str, "json"),
    _form("size", _BYTES),
]
"""Bytes, written `512MiB`, `8GB`."""
ByteRate = Annotated[
    float,
    BeforeValidator(_byte_rate),
    PlainSerializer(write_byte_rate, str, "json"),
    _form("byte rate", _RATES),
]
"""Bytes per second, written `3.35TB/s`: of memories and of what joins chips; lines have a `Bandwidth`."""
ComputingRate = Annotated[
    float,
    BeforeValidator(_computing_rate),
    PlainSerializer(write_computing_rate, str, "json"),
    _form("computing rate", _FLOPS),
]
"""Floating-point operations per second, written `989TFLOP/s`."""
