"""Latency by what NVIDIA measured of kernels: the optional package `aiconfigurator-core`, asked once for a grid, which
is checked against a roofline and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from pdd_runtime.planner.figures import FigureError
from pdd_runtime.planner.hardware import counted
from pdd_runtime.planner.latency.grid_cache import GridCache, Grids
from pdd_runtime.planner.latency.roofline import Roofline, RooflineConfig
from pdd_runtime.planner.latency.surface import Surface
from pdd_runtime.planner.latency.table import Grid
from pdd_runtime.planner.model_spec import ModelFigures
from pdd_runtime.plugins.latency import LatencyModel

PACKAGE = "aiconfigurator-core"
_SYSTEMS = {"a100": "a100_sxm", "b200": "b200_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "l40s": "l40s"}
_NEW = (1, 16, 64, 256, 1024, 4096, 8192, 16_384)
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXT = (0, 1024, 4096, 16_384, 65_536, 131_072)
_TIMES = 5.0
_SLACK = 0.03
"""A cell is believed up to so many times what a roofline says and so many seconds besides: launches of short passes."""
_FLOOR = 0.8
"""And down to this share of what no kernel can beat."""
_SHOWN = 3


class AiconfiguratorConfig(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    hardware: str
    """What a worker has: `h100`, `8xh200`, …"""
    model: str
    """The model, as Hugging Face calls it: `deepseek-ai/DeepSeek-V3`."""
    backend: Literal["sglang", "trtllm", "vllm"] = "sglang"
    """Whose kernels."""
    kv_bits: Literal[8, 16] = 16
    """Of a number in KV."""
    figures: ModelFigures | None = None
    """The model's own figures, where it is not known: its memory is reckoned from them."""
    options: dict[str, str | int] = Field(default={}, max_length=32)
    """What else the package is told, e.g. `moe_quant_mode: fp8_block`; by default all chips are tensor parallel, and
    expert parallel where there are experts."""
    trust: bool = False
    """Take a grid with cells that a roofline does not believe."""


class Kernels(Protocol):
    """What the package knows of one model on one machine. Milliseconds."""

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float: ...

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float: ...


class Aiconfigurator(LatencyModel):
    """Between the grid's points as `table` does it."""

    name = "aiconfigurator"
    Config = AiconfiguratorConfig
    config: AiconfiguratorConfig

    def __init__(self, config: AiconfiguratorConfig) -> None:
        """Raises `FigureError` where the package is missing or cannot answer, the weights do not fit, or its answers
        are not to be believed."""
        super().__init__(config)
        self._roofline = Roofline(_usual(config))
        self.kv_constant, self.kv_token = self._roofline.kv_constant, self._roofline.kv_token
        self._version = _version()
        cache = GridCache(f"{PACKAGE} {self._version}", config.model_dump(mode="json", exclude={"trust"}))
        grids = cache.read()
        if grids is None:
            grids = _asked(config)
            cache.write(grids)
        if not config.trust and (doubts := list(_doubts(grids, config))):
            raise FigureError(
                f"{len(doubts)} of {PACKAGE}'s answers for {config.model} on {config.hardware} cannot be right",
                why="; ".join(doubts[:_SHOWN]),
                fix="take another backend; or set trust: true and take them as they are",
            )
        self._prefill, self._decode = Surface(grids.prefill), Surface(grids.decode)

    @property
    def source(self) -> str:
        config = self.config
        return f"{PACKAGE} {self._version}: kernels of {config.backend}, {config.model} on {config.hardware}"

    def prefill(self, new: int, context: int) -> float:
        return self._prefill(new, context)

    def decode(self, batch: int, context: float) -> float:
        return self._decode(batch, context)

    def capacity(self, requests: int) -> int:
        """As the roofline reckons it."""
        return self._roofline.capacity(requests)


def compile_kernels(config: AiconfiguratorConfig) -> Kernels:
    """Ask the package for the model. Raises `FigureError`."""
    chips, chip = counted(config.hardware)
    if chip not in _SYSTEMS:
        raise FigureError(f"{PACKAGE} knows no {chip}", why=f"it knows {', '.join(_SYSTEMS)}", fix="take a roofline")
    spread: dict[str, Any] = {"tp_size": chips, "moe_tp_size": 1, "moe_ep_size": chips}
    kv = {8: "fp8", 16: "bfloat16"}[config.kv_bits]
    try:
        # Half a gigabyte with what it needs: only who asks for it imports it.
        from aiconfigurator_core.sdk.engine import EngineHandle

        options = {**spread, "kvcache_quant_mode": kv, **config.options}
        kernels: Kernels = EngineHandle.compile(config.model, _SYSTEMS[chip], config.backend, **options)
    except Exception as error:
        raise _cannot(config, error) from error
    return kernels


def _asked(config: AiconfiguratorConfig) -> Grids:
    kernels = compile_kernels(config)

    def step(batch: int, context: int) -> float:
        # A sequence that is decoded has at least its own last token.
        return kernels.predict_decode_latency(batch, max(1, context), 2)

    def new_tokens(new: int, context: int) -> float:
        # Kernels for prefill are told of as if a few tokens behind a long context did not have to read its KV.
        return max(kernels.predict_prefill_latency(1, new + context, context), step(1, context))

    try:
        return Grids(prefill=_grid(_NEW, _CONTEXT, new_tokens), decode=_grid(_BATCH, _CONTEXT, step))
    except Exception as error:
        raise _cannot(config, error) from error


def _grid(rows: tuple[int, ...], columns: tuple[int, ...], milliseconds: Callable[[int, int], float]) -> Grid:
    seconds = [[milliseconds(row, column) / 1e3 for column in columns] for row in rows]
    return Grid(tokens=list(rows), context=list(columns), seconds=[list(row) for row in seconds])


def _doubts(grids: Grids, config: AiconfiguratorConfig) -> Iterator[str]:
    """What a roofline does not believe, the worst first."""
    usual = _usual(config)
    ideal = usual.model_copy(update={"compute": 1.0, "bandwidth": 1.0, "network": 1.0, "layer": 0.0})
    high, low = Roofline(usual), Roofline(ideal)
    found: list[tuple[float, str]] = []
    for grid, name in ((grids.prefill, "prefill"), (grids.decode, "decode")):
        what = "a pass over {} tokens behind {}" if name == "prefill" else "a step of {} sequences of {}"
        for row, cells in zip(grid.tokens, grid.seconds, strict=True):
            for column, seconds in zip(grid.context, cells, strict=True):
                expected: float = getattr(high, name)(row, column)
                least: float = getattr(low, name)(row, column)
                if seconds is not None and not _FLOOR * least <= seconds <= _TIMES * expected + _SLACK:
                    times = max(seconds / expected, least / max(seconds, 1e-9))
                    said = (
                        f"{what.format(row, column)} in {seconds * 1e3:.3g} ms, by a roofline {expected * 1e3:.3g} ms"
                    )
                    found.append((times, said))
    yield from (said for _, said in sorted(found, reverse=True))


def _usual(config: AiconfiguratorConfig) -> RooflineConfig:
    return RooflineConfig(hardware=config.hardware, model=config.model, kv_bits=config.kv_bits, figures=config.figures)


def installed() -> bool:
    """Whether the package is there."""
    try:
        version(PACKAGE)
    except PackageNotFoundError:
        return False
    return True


def _version() -> str:
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        raise FigureError(
            f"the latency model aiconfigurator needs {PACKAGE}",
            why="it is not installed",
            fix="pip install 'pdd-runtime[aiconfigurator]' (half a gigabyte with what it needs), or take a roofline",
        ) from None


def _cannot(config: AiconfiguratorConfig, error: Exception) -> FigureError:
    if isinstance(error, FigureError):
        return error
    return FigureError(
        f"{PACKAGE} cannot tell of {config.model} on {config.hardware} with {config.backend}",
        why=f"{type(error).__name__}: {' '.join(str(error).split())}"[:500],
        fix="take another backend or other options, or a roofline",
    )
