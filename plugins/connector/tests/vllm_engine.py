"""vLLM as its connector sees it: a scheduler with pages, requests, and what it says of each step. Its objects have the
attributes that the connector uses; that vLLM's have them is for the tests with vLLM itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pdd_connector.vllm.scheduler import SchedulerSide
from pdd_connector.vllm.worker import WorkerSide

KV = NDArray[np.unsignedinteger[Any]]


@dataclass
class Request:
    request_id: str
    tokens: list[int]
    kv_transfer_params: dict[str, Any] | None = None
    num_computed_tokens: int = 0
    pages: list[int] = field(default_factory=list)
    hit: int = 0
    """Tokens in the engine's own cache, in the first of `pages`."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass
class New:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class Cached:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class Output:
    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)


class Engine:
    """Computes the KV of a token as (its id, position) in every element. One step a call, of one request or none."""

    def __init__(self, scheduler: SchedulerSide, worker: WorkerSide, caches: KV, page: int) -> None:
        """`caches`: `[pages, layers, 2, tokens, heads, head_dim]`."""
        self.scheduler, self.worker, self.caches, self.page = scheduler, worker, caches, page
        self._seen: set[str] = set()

    def step(
        self, request: Request | None = None, tokens: int = 0, pages: tuple[int, ...] = (), drafts: int = 0
    ) -> int:
        """Compute `tokens` more of the request, with some pages more; the last `drafts` are guesses that are refused.
        Returns how many tokens the connector was to load."""
        output, loaded, before = Output(), 0, 0
        if request is not None:
            resumed = request.num_computed_tokens == 0 and request.request_id in self._seen
            before = request.num_computed_tokens
            request.pages += pages
            if before == 0:
                loaded = self.scheduler.matched(request, request.hit)
                self.scheduler.allocated(request, loaded)
                before = request.hit + loaded
            if request.request_id not in self._seen:
                output.scheduled_new_reqs = [New(request.request_id, (list(request.pages),), before)]
            else:
                numbers = request.pages if resumed else list(pages)
                output.scheduled_cached_reqs = Cached(
                    [request.request_id], {request.request_id} if resumed else set(), [(list(numbers),)], [before]
                )
            self._seen.add(request.request_id)
            output.num_scheduled_tokens = {request.request_id: tokens}
            if drafts:
                output.scheduled_spec_decode_tokens = {request.request_id: [0] * drafts}
        step = self.scheduler.step(output)
        self.worker.begin(step)
        self.worker.load(step)
        if request is not None:
            for position in range(before, before + tokens):
                self.row(request, position)[:] = value(request, position)
            request.num_computed_tokens = before + tokens - drafts
        self.worker.save(step)
        return loaded

    def again(self, request: Request, before: int, tokens: int) -> None:
        """Compute the tokens from `before` up to `tokens` of a request that has its pages, after a load that failed.
        Those before have been computed by whoever shares them."""
        self._seen.add(request.request_id)
        cached = Cached([request.request_id], set(), [None], [before])
        step = self.scheduler.step(Output([], cached, {request.request_id: tokens - before}))
        self.worker.begin(step)
        for position in range(tokens):
            self.row(request, position)[:] = value(request, position)
        request.num_computed_tokens = tokens
        self.worker.save(step)

    def row(self, request: Request, position: int) -> KV:
        """K and V of one token, `[layers, 2, heads, head_dim]`."""
        return self.caches[request.pages[position // self.page], :, :, position % self.page]

    def finish(self, request: Request) -> None:
        self.scheduler.finished(request)
        request.pages = []


def value(request: Request, position: int) -> int:
    """Every element of a token's KV. A guess has KV as well."""
    token = request.tokens[position] if position < len(request.tokens) else 99
    return (token << 8) + position + 1
