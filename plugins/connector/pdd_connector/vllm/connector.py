"""The KV connector that a stock vLLM server loads: `--kv-transfer-config '{"kv_connector": "PddConnector",
"kv_connector_module_path": "pdd_connector.vllm.connector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
"kv_connector_extra_config": {"pdd_socket": PATH}}'`.

The worker beside the server announces each request before it sends it. The scheduler's part finds it by the id in the
request's `kv_transfer_params`, and offers what lies in the worker's blocks; the workers' parts copy these into pages
before the step that uses them, and copy out what a step has computed once it is done. A page is copied, not held: the
engine frees it when it likes.

The interfaces are vLLM's own and move with its versions. What was tried is said in the backend's README.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.version import __version__ as VERSION  # noqa: N812 - it is a constant

from pdd_connector.client import AgentClient, Geometry
from pdd_connector.vllm.layout import UnknownLayout, page_layouts, probe
from pdd_connector.vllm.pages import CacheLayout, Copier, HostCopier
from pdd_connector.vllm.scheduler import SchedulerSide
from pdd_connector.vllm.step import Step
from pdd_connector.vllm.worker import WorkerSide

SOCKET = "pdd_socket"
"""In `kv_connector_extra_config`: the worker's unix socket."""
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_INTEGERS = {2: torch.int16, 4: torch.int32}
_UNSIGNED = {2: np.uint16, 4: np.uint32}
_SCRATCH = 1
"""The page that is written to see where things lie. Before the first request none is in use, and page 0 never is."""


class PddConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """One in the scheduler, one in each worker. Raises at the start where KV cannot be shared, and never later."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config, self._cache = vllm_config, kv_cache_config
        self._path = str(vllm_config.kv_transfer_config.get_from_extra_config(SOCKET, ""))
        if not self._path:
            raise ValueError(f"kv_connector_extra_config has no {SOCKET}: the path of the worker's socket")
        _check_parallel(vllm_config.parallel_config)
        self._client: AgentClient | None = None
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._pool: Any = None
        if role == KVConnectorRole.SCHEDULER:
            ranks = vllm_config.parallel_config.tensor_parallel_size
            self._client = AgentClient(self._path, engine=f"vllm {VERSION}", role="scheduler", ranks=ranks)
            self._scheduler = SchedulerSide(self._client)

    @property
    def requires_kv_delivery(self) -> bool:
        """What a preempted request has not written is written when it is computed again."""
        return False

    def shutdown(self) -> None:
        if self._client is not None:
            self._client.close()

    # In the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        scheduler = self._scheduler
        assert scheduler is not None
        return scheduler.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        scheduler = self._scheduler
        assert scheduler is not None
        scheduler.allocated(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        scheduler = self._scheduler
        assert scheduler is not None
        return scheduler.step(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        scheduler = self._scheduler
        assert scheduler is not None
        scheduler.finished(request)
        return False, None

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._pool = gpu_block_pool

    def update_connector_output(self, connector_output: Any) -> None:
        # vLLM has them in its prefix cache from the moment it planned to fill them, and would leave them there where
        # their request is aborted before it is computed anew.
        if self._pool is not None and connector_output.invalid_block_ids:
            self._pool.evict_blocks(set(connector_output.invalid_block_ids))

    # In a worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        parallel = self._config.parallel_config
        spec, names = _spec(self._cache)
        layers = self._config.compilation_config.static_forward_context
        ordered = sorted(names, key=extract_layer_index)
        caches = [kv_caches[name] for name in ordered]
        layout = cache_layout([layers[name] for name in ordered], caches, spec.block_size)
        ranks = parallel.tensor_parallel_size
        tokens, heads, dim = layout.shape
        self._client = AgentClient(
            self._path,
            engine=f"vllm {VERSION}",
            role="worker",
            rank=get_tensor_model_parallel_rank(),
            ranks=ranks,
            geometry=Geometry(
                layers=layout.layers,
                kv_heads=heads * ranks,
                head_dim=dim,
                dtype=_DTYPES[caches[0].dtype],  # type: ignore[arg-type]
                block_size=tokens,
                capacity=self._cache.num_blocks * tokens,
            ),
        )
        self._worker = WorkerSide(self._client, _copier(caches[0], layout))

    def handle_preemptions(self, kv_connector_metadata: Step) -> None:
        # The one hook that comes before the pages of finished requests are written by others, in every step.
        if self._worker is not None:
            self._worker.begin(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.load(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._get_connector_metadata())

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self._worker is None else self._worker.failed()


def cache_layout(layers: list[Any], caches: list[torch.Tensor], page: int) -> CacheLayout:
    """Where the pages of `page` tokens lie. `layers` are vLLM's attention layers, in order; `caches` theirs,
    `[pages, heads, tokens, K and V]` with any strides. Writes page 1 of each. Raises `UnknownLayout`."""
    cache = caches[0]
    if cache.dtype not in _DTYPES or cache.ndim != 4:
        raise UnknownLayout(f"a cache of {cache.dtype} with {cache.ndim} axes is none of K and V as they are computed")
    if len({(one.data_ptr(), one.shape, one.stride()) for one in caches}) != len(caches):
        raise UnknownLayout("layers that share one cache")
    pages, heads, tokens, width = cache.shape
    if tokens != page or width % 2:
        raise UnknownLayout(f"a page of {page} tokens has {tokens} rows of {width} elements")
    shape = (tokens, heads, width // 2)
    orders = [_order(one, its, shape) for one, its in zip(layers, caches, strict=True)]
    if any(not np.array_equal(order, orders[0]) for order in orders):
        raise UnknownLayout("layers whose pages are not alike")
    first = caches[0].storage_offset()
    starts = [one.storage_offset() - first for one in caches]
    stride = starts[1] if len(starts) > 1 else 0
    if starts != [number * stride for number in range(len(starts))] or len({_storage(one) for one in caches}) != 1:
        raise UnknownLayout("the layers' caches do not lie in one memory, one after another")
    where = np.zeros(cache.shape[1:], np.int64)
    for axis, step in enumerate(cache.stride()[1:]):
        where += np.expand_dims(np.arange(cache.shape[1 + axis]) * step, [a for a in range(3) if a != axis])
    keys, values = page_layouts(where.ravel()[orders[0]])
    return CacheLayout(pages, len(caches), int(first), int(cache.stride(0)), int(stride), keys, values, shape)


def _order(layer: Any, cache: torch.Tensor, shape: tuple[int, int, int]) -> np.ndarray[Any, Any]:
    """Where each element of K and V of a page lies in the page, as the layer's own operation writes them."""
    write = getattr(layer.impl, "do_kv_cache_update", None)
    if write is None:
        raise UnknownLayout(f"{type(layer.impl).__name__} shows no operation that writes a page")
    slots = torch.arange(shape[0], device=cache.device) + _SCRATCH * shape[0]
    bound = getattr(layer, "kv_cache", cache)

    def put(keys: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
        k, v = (torch.from_numpy(part.copy()).to(cache.device, cache.dtype) for part in (keys, values))
        write(layer, k, v, bound, slots)

    def get() -> np.ndarray[Any, Any]:
        page: np.ndarray[Any, Any] = cache[_SCRATCH].reshape(-1).to("cpu", torch.int64).numpy()
        return page

    try:
        return probe(put, get, shape)
    finally:
        cache[_SCRATCH].zero_()


def _copier(cache: torch.Tensor, layout: CacheLayout) -> Copier:
    """For the memory in which this cache lies, and all others."""
    width = cache.element_size()
    memory = torch.empty(0, dtype=_INTEGERS[width], device=cache.device).set_(cache.untyped_storage())
    if cache.device.type == "cpu":
        return HostCopier(memory.numpy().view(_UNSIGNED[width]), layout)
    from pdd_connector.vllm.device import DeviceCopier

    return DeviceCopier(memory, layout)


def _spec(config: Any) -> tuple[Any, list[str]]:
    """The one kind of KV that all layers have, and the layers' names. Raises `UnknownLayout`."""
    groups = config.kv_cache_groups
    if len(groups) != 1:
        raise UnknownLayout(f"{len(groups)} groups of layers with KV of different kinds")
    spec = groups[0].kv_cache_spec
    if type(spec) is not FullAttentionSpec or spec.sliding_window or spec.attention_chunk_size:
        raise UnknownLayout(f"KV of the kind {spec} is not one K and one V for every token")
    return spec, list(groups[0].layer_names)


def _check_parallel(parallel: Any) -> None:
    """Raises `ValueError` for ways to divide a model in which a rank's KV is no shard of heads."""
    for name in ("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise ValueError(f"{name} is {size}: KV is shared with tensor parallelism alone; take more replicas")


def _storage(cache: torch.Tensor) -> int:
    return int(cache.untyped_storage().data_ptr())
