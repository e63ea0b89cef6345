"""The connector in vLLM's scheduler: which KV is offered, where it goes, and how far a step computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdd_connector.client import AgentClient, Transfer
from pdd_connector.vllm.step import Load, Pages, Step

KEY = "pdd"
"""In a request's `kv_transfer_params`: the id of its transfer."""


class _Tracked:
    """A request that the engine has given pages."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.pages = 0
        self.external = 0
        self.planned = False


class SchedulerSide:
    """Follows the requests that are transfers. Called in the scheduler's thread, in the order of the engine's steps.

    vLLM's own request and scheduler output are taken as they come; what is used of them is held by a test.
    """

    def __init__(self, client: AgentClient) -> None:
        self._client = client
        self._tracked: dict[str, _Tracked] = {}
        self._finished: dict[str, int] = {}

    def matched(self, request: Any, computed: int) -> int:
        """How many tokens behind the first `computed` can be loaded. At least the request's last token is left: the
        engine must compute something to have a next token."""
        transfer = self._transfer(request)
        if transfer is None:
            return 0
        offered: int = min(transfer.offered, request.num_tokens - 1)
        return max(0, offered - computed)

    def allocated(self, request: Any, external: int) -> None:
        """The request has its pages, and `external` tokens are to be loaded into them. The engine counts on these, so
        they are planned also where the transfer is over meanwhile: then the load fails, and says so."""
        id = transfer_id(request)
        if id is None or not (external or self._client.request(id)):
            return
        tracked = self._tracked.setdefault(request.request_id, _Tracked(id))
        tracked.external = external

    def finished(self, request: Any) -> None:
        """The request is over, however it ended."""
        tracked = self._tracked.pop(request.request_id, None)
        id = tracked.id if tracked is not None else transfer_id(request)
        if id is not None:
            # The KV of its last token may have been computed, by a step that was under way; nobody waits for it.
            self._finished[id] = min(request.num_computed_tokens, request.num_tokens - 1)

    def step(self, output: Any) -> Step:
        """What the workers must know of the step that `output` describes."""
        pages: dict[str, Pages] = {}
        loads: list[Load] = []
        computed: dict[str, tuple[int, int]] = {}

        def add(request_id: str, before: int, numbers: Sequence[int], *, anew: bool) -> None:
            tracked = self._tracked.get(request_id)
            if tracked is None:
                return
            start = 0 if anew else tracked.pages
            if anew or numbers:
                pages[tracked.id] = Pages(start, tuple(numbers))
                tracked.pages = start + len(numbers)
            local = before - tracked.external
            if not tracked.planned:
                tracked.planned = True
                self._client.planned(tracked.id, local, tracked.external)
            if tracked.external:
                loads.append(Load(tracked.id, local, before))
                tracked.external = 0
            # Drafts may be refused, and then their KV is no one's.
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            computed[tracked.id] = before, before + output.num_scheduled_tokens[request_id] - drafts

        for new in output.scheduled_new_reqs:
            add(new.req_id, new.num_computed_tokens, new.block_ids[0], anew=True)
        cached = output.scheduled_cached_reqs
        for request_id, before, groups in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            numbers = groups[0] if groups else ()
            add(request_id, before, numbers, anew=request_id in cached.resumed_req_ids)
        finished, self._finished = self._finished, {}
        return Step(finished=finished, pages=pages, loads=tuple(loads), computed=computed)

    def _transfer(self, request: Any) -> Transfer | None:
        id = transfer_id(request)
        return None if id is None else self._client.request(id)


def transfer_id(request: Any) -> str | None:
    """The id that the worker sent the request with; None for requests of others."""
    params = request.kv_transfer_params
    id = params.get(KEY) if isinstance(params, dict) else None
    return id if isinstance(id, str) else None
