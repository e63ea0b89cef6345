"""SGLang's side: a linker for its unified radix cache, as `--unified-cache-external-linker-backend dynamic` loads it.

Tried with SGLang 0.5.23. One linker lives in the scheduler process of each tensor-parallel rank. SGLang asks `lookup`
which pages of a request can be restored, has `load` fill slots with them, and shows every page that joins its tree to
`offload`: after each chunk of a prefill, and when a request ends. The request is sent with `session_id` = `rid`, which
is how `offload` learns whose pages these are.

The linker keeps nothing: it says so by refusing every offload after it has copied what is wanted. So SGLang shows the
same pages again when another request comes by them, and a worker that has evicted its copy gets a new one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker
from sglang.srt.mem_cache.utils import storage_namespace_seed
from sglang.version import __version__

from pdd_connector.client import AgentClient, Transfer
from pdd_connector.sglang.pool import Place, SlotPool, Unsupported

log = logging.getLogger(__name__)

T = TypeVar("T")


def _never_raises(answer: Any) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """The engine must go on whatever happens here: it then recomputes, or is not asked again."""

    def wrap(method: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> T:
            try:
                return method(*args, **kwargs)
            except Exception:
                log.exception("%s failed", method.__name__)
                return answer  # type: ignore[no-any-return]

        return call

    return wrap


class LoadsAreDone:
    """The counter that layers of a forward pass wait on: every load was done, or ordered before it, in `load`."""

    consumer_index = -1

    def set_consumer(self, index: int) -> None:
        pass

    def wait_until(self, threshold: int) -> None:
        pass


class PddLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """Shares pages of one rank with the worker whose socket is `extra_config["pdd_socket"]`."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Raises `Refused` where the worker will not have this engine, `Unsupported` for a cache that is not plain
        attention: the server then does not start."""
        path = (extra_config or {}).get("pdd_socket")
        if not path:
            raise ValueError('linker_extra_config has no "pdd_socket": the path of the worker\'s socket')
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        _check(params, components)
        self.forward_stream = forward_stream
        self.layer_done_counter = LoadsAreDone()
        self.pools = {PoolName.KV: kvcache}
        self._page = int(params.page_size)
        self._pool = SlotPool(kvcache, forward_stream)
        rank, ranks = _rank(params)
        self._client = AgentClient(
            path,
            engine=f"sglang {__version__}",
            role="worker",
            rank=rank,
            ranks=ranks,
            geometry=self._pool.geometry(ranks),
            page=self._page,
            seed=_seed,
        )
        self._written: dict[str, int] = {}
        """Request → its leading tokens whose KV is in the blocks, or on its way there."""
        self._planned: dict[str, tuple[int, int]] = {}
        """Request → what the worker was told last: tokens of SGLang's own, tokens to load."""
        self._seen: tuple[str | None, int] = (None, 0)
        """The request that the last page shown belongs to, and the position behind that page."""

    # Blocks to slots

    @_never_raises([])
    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """The one number of pages, behind those that SGLang has, that the worker's offer restores."""
        transfer, keys = self._client.request(rid), _pages(transfers)
        if transfer is None or not keys:
            return []
        start = _find(transfer, keys)
        if start is None:
            return []
        pages = min(transfer.offered // self._page - start, len(keys))
        if pages <= 0 or not _continue(transfer, keys[:pages], start):
            pages = 0
        self._plan(rid, start * self._page, pages * self._page)
        return [pages] if pages else []

    @_never_raises(False)
    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Copy the pages that `lookup` found into the slots given. False: SGLang computes them."""
        keys, slots = _pages(transfers), transfers[0].device_indices
        with self._client.using(rid) as transfer:
            start = None if transfer is None else _find(transfer, keys)
            if transfer is None or start is None or not _continue(transfer, keys, start):
                return False
            first, last = start * self._page, (start + len(keys)) * self._page
            if last > transfer.offered or len(slots) != last - first:
                return False
            self._pool.load(slots, self._place(transfer, first, last))
        self._client.loaded(rid, last - first)
        return True

    def start_layer_wise_loading(self) -> int:
        return -1

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return False

    # Slots to blocks

    @_never_raises(False)
    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Copy the pages of a request that wants them. Always False: SGLang is to show them again."""
        keys = _pages(transfers)
        position, self._seen = self._seen, (None, 0)
        if session_id is None or not keys:
            return False
        with ExitStack() as using:
            transfer = using.enter_context(self._client.using(session_id))
            if transfer is None:
                return False
            start = _find(transfer, keys)
            if start is None:
                # Pages of an output are shown behind those of their prompt, which is how their place is known.
                if position[0] != session_id or position[1] < len(transfer.keys):
                    return False
                start = position[1]
            elif not _continue(transfer, keys[: len(transfer.keys) - start], start):
                return False
            self._seen = (session_id, start + len(keys))
            self._save(transfer, start * self._page, transfers[0].device_indices, using)
        return False

    def num_completed_offloads(self) -> int:
        return 0

    def pop_completed_offload(self) -> bool:
        return False

    # Ends

    @_never_raises(None)
    def reset(self) -> None:
        self._pool.settle()
        self._seen = (None, 0)

    @_never_raises(None)
    def close(self) -> None:
        self._pool.close()
        self._client.close()

    def _save(self, transfer: Transfer, start: int, slots: torch.Tensor, using: ExitStack) -> None:
        """Copy what is wanted and not yet written of the tokens behind position `start`; `using` ends with the copy."""
        written = self._written_of(transfer)
        end = min(start + len(slots), len(transfer.blocks) * self._client.block_size)
        # An output joins the tree as a whole, when its request ends.
        over = start + len(slots) > transfer.tokens
        if not start <= written < end:
            if over:
                self._client.finished(transfer.id, written)
            return
        self._written[transfer.id] = end
        held = using.pop_all()

        def done(saved: bool) -> None:
            with held:
                if saved:
                    self._client.written(transfer.id, end)
                if over:
                    self._client.finished(transfer.id, end if saved else written)

        try:
            self._pool.save(slots[written - start : end - start], self._place(transfer, written, end), done)
        except BaseException:
            held.close()  # the worker waits for it
            raise

    def _written_of(self, transfer: Transfer) -> int:
        written = self._written.get(transfer.id)
        if written is None:
            alive = {other.id for other in self._client.transfers()}
            self._written = {id: tokens for id, tokens in self._written.items() if id in alive}
            self._planned = {id: plan for id, plan in self._planned.items() if id in alive}
            written = transfer.first * self._client.block_size
        return written

    def _plan(self, rid: str, local: int, offered: int) -> None:
        if self._planned.get(rid) != (local, offered):
            self._planned[rid] = (local, offered)
            self._client.planned(rid, local, offered)

    def _place(self, transfer: Transfer, start: int, end: int) -> Place:
        return Place(self._client.blocks, self._client.block_size, transfer.blocks, start, end)


def _seed(salt: str) -> bytes:
    """What SGLang's keys of a tenant's pages begin with."""
    return bytes.fromhex(storage_namespace_seed(None, salt or None) or "")


def _pages(transfers: list[Any]) -> list[str]:
    """The keys of the pages that SGLang speaks of, in hexadecimal digits."""
    if not transfers:
        return []
    if len(transfers) > 1 or transfers[0].name != PoolName.KV:
        raise Unsupported(f"pools {[transfer.name for transfer in transfers]}, where only plain attention is known")
    return list(transfers[0].keys)


def _find(transfer: Transfer, keys: list[str]) -> int | None:
    """The place of the first of `keys` among those of the request's known tokens; None: it is none of them."""
    try:
        return transfer.keys.index(bytes.fromhex(keys[0]))
    except ValueError:
        return None


def _continue(transfer: Transfer, keys: list[str], start: int) -> bool:
    """The request's own keys are these from `start` on. Each is a hash of the one before, so the last tells for all."""
    end = start + len(keys)
    return end <= len(transfer.keys) and transfer.keys[end - 1] == bytes.fromhex(keys[-1])


def _rank(params: Any) -> tuple[int, int]:
    group = params.attn_tp_cache_group or params.tp_cache_group
    if group is None or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def _check(params: Any, components: Any) -> None:
    names = sorted(getattr(component, "name", str(component)) for component in components)
    if names != ["FULL"]:
        raise Unsupported(f"a model with {', '.join(names)} state: only full attention in every layer is supported")
    if params.pp_size != 1 or params.attn_cp_size != 1:
        raise Unsupported("pipeline and context parallelism are not supported: use tensor parallelism")
    if params.is_eagle:
        raise Unsupported("speculative decoding whose tree is of pairs of tokens (EAGLE) is not supported")
