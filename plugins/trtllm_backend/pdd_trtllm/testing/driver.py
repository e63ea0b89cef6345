"""Calls a KV connector in the order in which TensorRT-LLM does, and refuses what TensorRT-LLM would."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from pdd_trtllm.testing.connector_bases import (
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    RequestData,
    SchedulerOutput,
)
from pdd_trtllm.testing.ranks import as_rank
from pdd_trtllm.testing.task import Task

if TYPE_CHECKING:
    import torch

STREAM = object()
"""Stands for the CUDA stream of a pass."""


class ConnectorDriver:
    """One scheduler, and a worker for each rank."""

    def __init__(self, module: str, scheduler: str, worker: str, args: Any, caches: Sequence[torch.Tensor]) -> None:
        """`caches`: each rank's own. Raises what the connector raises."""
        found = importlib.import_module(module)
        scheduler_class, worker_class = getattr(found, scheduler), getattr(found, worker)
        # Each may wait for the other.
        with ThreadPoolExecutor(max_workers=2) as pool:
            making = pool.submit(scheduler_class, args)
            self.workers: list[KvCacheConnectorWorker] = [
                self._worker(worker_class, args, rank) for rank in range(len(caches))
            ]
            self.scheduler: KvCacheConnectorScheduler = making.result()
        if not isinstance(self.scheduler, KvCacheConnectorScheduler):
            raise TypeError(f"{scheduler} is no KvCacheConnectorScheduler")
        self._passed: list[Callable[[], None]] = []
        for rank, (one, cache) in enumerate(zip(self.workers, caches, strict=True)):
            with as_rank(rank):
                if (passed := one.register_forward_pass_callable()) is not None:
                    self._passed.append(passed)
                one.register_kv_caches(cache)
        self._external: dict[int, int] = {}
        self.saving: dict[int, Task] = {}
        """Tasks that are over but for their pages."""
        self._new_saving: list[int] = []
        self._finished = [set[int]() for _ in self.workers]

    @staticmethod
    def _worker(worker_class: type[Any], args: Any, rank: int) -> KvCacheConnectorWorker:
        with as_rank(rank):
            worker = worker_class(args)
        if not isinstance(worker, KvCacheConnectorWorker):
            raise TypeError(f"{worker_class.__name__} is no KvCacheConnectorWorker")
        return worker

    def match(self, task: Task, found: int) -> int:
        """Tokens that the connector will load behind the first `found`."""
        tokens, later = self.scheduler.get_num_new_matched_tokens(task, found)
        if type(tokens) is not int or type(later) is not bool or tokens < 0:
            raise TypeError(f"a count and a truth value are wanted, not {tokens!r}, {later!r}")
        if later and not tokens:
            raise RuntimeError("load_kv_async must be False when num_tokens is 0")
        if later:
            raise NotImplementedError("this stand-in loads before the pass only")
        if found + tokens >= task.prompt:
            raise RuntimeError("at least one token of the prompt must be left to compute")
        self._external[task.request_id] = tokens
        self.scheduler.update_state_after_alloc(task, list(task.held.pages))
        return tokens

    def begin_pass(self, context: Sequence[tuple[Task, int]], generation: Sequence[Task]) -> None:
        """`context`: tasks, and how many tokens of their prompts the pass computes."""
        output = SchedulerOutput()
        for task, tokens in context:
            new = not task.shown_tokens
            position = task.computed - self._external.pop(task.request_id, 0)
            data = self._data(task, position, tokens)
            (output.new_requests if new else output.cached_requests).append(data)
        for task in generation:
            output.cached_requests.append(self._data(task, len(task.known) - 1, 1))
        metadata = self.scheduler.build_connector_meta(output)
        sent = pickle.dumps(metadata)
        for rank, worker in enumerate(self.workers):
            with as_rank(rank):
                worker.bind_connector_meta(metadata if rank == 0 else pickle.loads(sent))
                worker.start_load_kv(STREAM)

    def layer(self, index: int, compute: Callable[[], None]) -> None:
        for worker in self.workers:
            worker.wait_for_layer_load(index, STREAM)
        compute()
        for worker in self.workers:
            worker.save_kv_layer(index, STREAM)

    def end_pass(self) -> None:
        for passed in self._passed:
            passed()
        for worker in self.workers:
            worker.wait_for_save(STREAM)

    def finish(self, task: Task) -> bool:
        """Whether the task's pages must stay."""
        saving = self.scheduler.request_finished(task, list(task.held.pages))
        if type(saving) is not bool:
            raise TypeError(f"a truth value is wanted, not {saving!r}")
        if saving:
            self.saving[task.request_id] = task
            self._new_saving.append(task.request_id)
        return saving

    def saved(self) -> list[Task]:
        """Tasks whose pages all ranks are through with."""
        new, self._new_saving = self._new_saving, []
        for finished, worker in zip(self._finished, self.workers, strict=True):
            saved, loaded = worker.get_finished(list(new), [])
            if loaded or not set(saved) <= self.saving.keys() - finished:
                raise KeyError(f"requests were named that are not waited for: {saved}, {loaded}")
            finished.update(saved)
        done = set.intersection(*self._finished)
        for finished in self._finished:
            finished -= done
        return [self.saving.pop(number) for number in sorted(done)]

    @staticmethod
    def _data(task: Task, position: int, tokens: int) -> RequestData:
        new_tokens = task.known[task.shown_tokens :]
        new_pages = task.held.pages[task.shown_pages :]
        task.shown_tokens, task.shown_pages = len(task.known), len(task.held.pages)
        return RequestData(task.request_id, new_tokens, new_pages, position, tokens)
