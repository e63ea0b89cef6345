"""The KV connector that TensorRT-LLM loads: `kv_connector_config` names this module, `PddConnectorScheduler` and
`PddConnectorWorker`.

The two classes are made when they are first asked for, because their bases are TensorRT-LLM's own: what they do is in
`trtllm_scheduler` and `trtllm_worker`, which need none of it. The environment says where the worker listens:
PDD_SOCKET, or TRTLLM_PDD_SOCKET (TensorRT-LLM hands variables of that prefix on to the processes of its other ranks).
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pdd_connector.client import AgentClient, Geometry, Transfer
from pdd_connector.trtllm.pages import Pages, Unsupported, check_attention
from pdd_connector.trtllm.scheduler import SchedulerSide
from pdd_connector.trtllm.step import Step
from pdd_connector.trtllm.worker import WorkerSide

log = logging.getLogger(__name__)

SOCKET = ("PDD_SOCKET", "TRTLLM_PDD_SOCKET")
_BASES = (
    "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector",
    "tensorrt_llm._torch.pyexecutor.kv_cache_connector",
)
"""Where releases have the base classes, the newest first."""
T = TypeVar("T")


def __getattr__(name: str) -> Any:
    if name == "PddConnectorScheduler":
        return _scheduler_class()
    if name == "PddConnectorWorker":
        return _worker_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _scheduler_class() -> type[Any]:
    return type("PddConnectorScheduler", (_Scheduler, _base("KvCacheConnectorScheduler")), {})


@functools.cache
def _worker_class() -> type[Any]:
    return type("PddConnectorWorker", (_Worker, _base("KvCacheConnectorWorker")), {})


def _base(name: str) -> type[Any]:
    for path in _BASES:
        try:
            base: type[Any] = getattr(importlib.import_module(path), name)
        except ImportError:
            continue
        return base
    raise ImportError(f"TensorRT-LLM has no {name} in {' or '.join(_BASES)}: 1.2 or newer is needed")


def _never_raises(otherwise: Callable[[], T]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """An exception would end the engine: it is logged, and the answer is that of a connector with nothing to do."""

    def wrap(method: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> T:
            try:
                return method(*args, **kwargs)
            except Exception:
                log.exception("pdd: %s failed", method.__name__)
                return otherwise()

        return guarded

    return wrap


def _nothing_finished() -> tuple[list[int], list[int]]:
    return [], []


class _Scheduler:
    """Beside TensorRT-LLM's own `KvCacheConnectorScheduler`."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)  # type: ignore[call-arg]
        page = llm_args.kv_cache_config.tokens_per_block
        ranks = llm_args.tensor_parallel_size
        client = AgentClient(_socket(), engine=_engine(), role="scheduler", ranks=ranks, page=page)
        self._side = SchedulerSide(client, page, overlap=not llm_args.disable_overlap_scheduler)

    @_never_raises(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._side.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """`build_connector_meta` is given the same pages."""

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        """May raise, as `start_load_kv` may, where a load was promised."""
        return self._side.step(scheduler_output)

    @_never_raises(lambda: False)
    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        return self._side.finished(request)

    @_never_raises(lambda: None)
    def request_reset(self, request: Any) -> None:
        self._side.reset(request)

    @_never_raises(lambda: None)
    def cancel_load(self, request: Any, start: int, end: int) -> None:
        self._side.cancelled(request, start)


class _Worker:
    """Beside TensorRT-LLM's own `KvCacheConnectorWorker`, which keeps the metadata."""

    get_connector_meta: Callable[[], Step | None]

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)  # type: ignore[call-arg]
        check_attention(llm_args.attn_backend)
        self._args = llm_args
        self._side: WorkerSide | None = None

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """Raises `Unsupported` and `Refused`: an engine whose KV cannot be shared should not start."""
        args, page = self._args, self._args.kv_cache_config.tokens_per_block
        ranks = args.tensor_parallel_size
        heads, head_dim = _heads(Path(args.model))
        if heads % ranks:
            raise Unsupported(f"{heads} heads of keys cannot be split over {ranks} ranks")
        pages = Pages(kv_cache_tensor, heads // ranks, head_dim, page)
        geometry = Geometry(pages.layers, heads, head_dim, pages.dtype, page, pages.count * page)
        client = AgentClient(
            _socket(),
            engine=_engine(),
            role="worker",
            rank=_rank(),
            ranks=ranks,
            geometry=geometry,
            on_change=self._changed,
        )
        self._side = WorkerSide(client, pages)

    def register_forward_pass_callable(self) -> Callable[[], None]:
        return self._passed

    def start_load_kv(self, stream: Any) -> None:
        """The one call that may raise. The engine has been told that this KV is there: with other bytes in its place it
        would answer wrongly, to later requests as well."""
        step = self.get_connector_meta()
        if self._side is not None and step is not None:
            self._side.load(step, stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Loads are on the stream of the pass, before it."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Published behind the pass."""

    @_never_raises(lambda: None)
    def wait_for_save(self, stream: Any) -> None:
        step = self.get_connector_meta()
        if self._side is not None and step is not None:
            self._side.save(step)

    @_never_raises(_nothing_finished)
    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        if self._side is None:
            return list(finished_gen_req_ids), []
        return self._side.finished(finished_gen_req_ids), []

    @_never_raises(lambda: None)
    def _passed(self) -> None:
        if self._side is not None:
            self._side.mark()

    def _changed(self, transfer: Transfer) -> None:
        if self._side is not None:
            self._side.wake(transfer)


def _socket() -> str:
    path = next((os.environ[name] for name in SOCKET if os.environ.get(name)), None)
    if path is None:
        raise Unsupported(f"set {SOCKET[0]} to the socket of the pdd-runtime worker, which `render engine` shows")
    return path


def _engine() -> str:
    return f"TensorRT-LLM {importlib.import_module('tensorrt_llm').__version__}"


def _rank() -> int:
    rank: int = importlib.import_module("tensorrt_llm._utils").mpi_rank()
    return rank


def _heads(model: Path) -> tuple[int, int]:
    """Heads of keys, of all ranks, and their width, as the model's directory says."""
    try:
        config = json.loads((model / "config.json").read_text())
        heads = config["num_attention_heads"]
        return config.get("num_key_value_heads") or heads, config.get("head_dim") or config["hidden_size"] // heads
    except (OSError, ValueError, KeyError) as error:
        raise Unsupported(f"the heads of {model} cannot be read from its config.json: {error!r}") from error
