"""The connector in TensorRT-LLM's scheduler: which KV is offered, where it goes, and how far a pass computes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from pdd_connector.client import AgentClient, Transfer
from pdd_connector.keys import page_key
from pdd_connector.trtllm.step import Load, Save, Step

HOLD = 10.0
"""Seconds after which blocks that were planned to be loaded are let go of in any case. A load is over within the pass
that it was planned for; a worker waits 30 s for its blocks."""


class _Hold:
    """Keeps the blocks of a transfer as they are, from the plan to load them until all ranks have loaded them."""

    def __init__(self, client: AgentClient, transfer: str) -> None:
        self._stack = ExitStack()
        self.transfer: Transfer | None = self._stack.enter_context(client.using(transfer))
        # Where the pass is the engine's last one, nothing else tells of its end.
        self._expiry = threading.Timer(HOLD, self.release)
        self._expiry.daemon = True
        self._expiry.start()
        self.over = False

    def release(self) -> None:
        """Idempotent."""
        self.over = True
        self._expiry.cancel()
        self._stack.close()


class _Tracked:
    """A request of the engine that is a transfer."""

    def __init__(self, transfer: Transfer, local: int, loaded: int, most: int | None) -> None:
        self.transfer = transfer
        self.most = most
        """Tokens whose KV there is in the end, where it makes all that it may; None: not known."""
        self.local = local
        """Tokens in the engine's own cache."""
        self.loaded = loaded
        """Tokens in its pages when its first pass begins."""
        self.hold: _Hold | None = None
        self.prompt = 0
        self.computed = 0
        """Tokens whose KV the passes so far have put into pages."""
        self.ready = 0


class SchedulerSide:
    """Follows the requests that are transfers. Called in the engine's thread, on its first rank alone.

    TensorRT-LLM's own request and scheduler output are taken as they come.
    """

    def __init__(self, client: AgentClient, page: int, *, overlap: bool) -> None:
        """`page`: tokens in a page. `overlap`: a pass begins before the tokens of the one before it are known."""
        self._client, self._page, self._overlap = client, page, overlap
        self._tracked: dict[int, _Tracked] = {}
        self._given: set[str] = set()
        """Transfers that some request has, or had."""
        self._loading: list[_Hold] = []
        """Of the last pass."""

    def matched(self, request: Any, computed: int) -> int:
        """How many tokens behind the first `computed` can be loaded. At least the request's last token is left: the
        engine must compute something to have a next token."""
        self.reset(request)
        tokens = request.get_tokens(0)
        found = self._find(tokens)
        if found is None:
            return 0
        hold = _Hold(self._client, found.id)
        if hold.transfer is None:
            hold.release()
            return 0
        # The engine may still be copying into a page that it found in part: loading there could be overwritten.
        end = min(hold.transfer.offered, len(tokens) - 1) if computed % self._page == 0 else 0
        tracked = _Tracked(hold.transfer, computed, max(computed, end), _most(request, len(tokens)))
        self._tracked[request.request_id] = tracked
        self._given.add(found.id)
        offered = tracked.loaded - computed
        if offered:
            tracked.hold = hold
        else:
            hold.release()
        self._client.planned(found.id, computed, offered)
        return offered

    def cancelled(self, request: Any, start: int) -> None:
        """What was offered from token `start` on will not be used after all."""
        tracked = self._tracked.get(request.request_id)
        if tracked is not None:
            tracked.loaded = max(tracked.local, min(tracked.loaded, start))

    def step(self, output: Any) -> Step:
        """What the workers must know of the pass that `output` describes."""
        for hold in self._loading:
            hold.release()
        self._loading = []
        loads: list[Load] = []
        saves: list[Save] = []
        for data, tracked in self._of_transfers(output.new_requests):
            loads += self._begin(tracked, data)
            saves.append(self._save(tracked, data))
        for data, tracked in self._of_transfers(output.cached_requests):
            self._go_on(tracked, data)
            saves.append(self._save(tracked, data))
        gone = self._aborted({data.request_id for data in (*output.new_requests, *output.cached_requests)})
        self._forget_gone()
        return Step(tuple(loads), tuple(saves), gone)

    def finished(self, request: Any) -> bool:
        """The request is over; True: its pages must stay until the workers have published them."""
        tracked = self._tracked.pop(request.request_id, None)
        # A token was chosen, so every rank has computed with what it loaded; there may be no pass behind to say so.
        if tracked is not None and (not tracked.prompt or len(request.get_tokens(0)) > tracked.prompt):
            self._release(tracked)
        return tracked is not None and self._client.request(tracked.transfer.id) is not None

    def reset(self, request: Any) -> None:
        """The request begins anew, in other pages."""
        tracked = self._tracked.pop(request.request_id, None)
        self._release(tracked)
        if tracked is not None:
            self._given.discard(tracked.transfer.id)

    def _of_transfers(self, requests: Sequence[Any]) -> list[tuple[Any, _Tracked]]:
        found = ((data, self._tracked.get(data.request_id)) for data in requests)
        return [(data, tracked) for data, tracked in found if tracked is not None]

    def _find(self, tokens: Sequence[int]) -> Transfer | None:
        """The transfer of a request with these tokens. Of several alike the oldest that no request had yet: what is
        computed for one is right for the other, too."""
        key, known = page_key(b"", tokens), self._client.transfers()
        self._given &= {transfer.id for transfer in known}
        alike = (transfer for transfer in known if transfer.key == key and transfer.id not in self._given)
        return next(alike, None)

    def _begin(self, tracked: _Tracked, data: Any) -> list[Load]:
        """The first pass of a request. What TensorRT-LLM says of the computed position leaves out what is loaded."""
        tracked.prompt = len(data.new_tokens)
        tracked.computed = tracked.loaded + data.num_scheduled_tokens
        if tracked.hold is None:
            return []
        self._loading.append(tracked.hold)
        first, last = tracked.local // self._page, -(-tracked.loaded // self._page)
        if first >= last:
            return []
        return [
            Load(
                transfer=tracked.transfer.id,
                pages=tuple(data.new_block_ids[first:last]),
                blocks=tracked.transfer.blocks[first:last],
                tokens=tracked.loaded - first * self._page,
            )
        ]

    def _go_on(self, tracked: _Tracked, data: Any) -> None:
        """Another pass: the next part of a prompt, or one more token."""
        said = data.computed_position + data.num_scheduled_tokens
        if tracked.computed < tracked.prompt or not self._overlap:
            tracked.computed = said
        else:
            # It counts the tokens it knows, and those are one behind, but where the request was left out of a pass.
            tracked.computed = min(max(tracked.computed + 1, said), said + 1)

    def _save(self, tracked: _Tracked, data: Any) -> Save:
        computed = tracked.computed
        ready = computed if computed == tracked.prompt else computed // self._page * self._page
        tracked.ready = max(tracked.ready, ready)
        return Save(data.request_id, tracked.transfer.id, tuple(data.new_block_ids), tracked.ready, computed)

    def _aborted(self, scheduled: set[int]) -> tuple[int, ...]:
        """Of the tracked: those that are in no pass any more though they have not ended. Releases before 1.4 tell a
        connector nothing of an abort. A request that has made all its tokens may be left out before its end is told."""
        gone = []
        for number, tracked in tuple(self._tracked.items()):
            decoding = 0 < tracked.prompt <= tracked.computed
            most = tracked.most if tracked.most is not None else 0 if self._overlap else tracked.computed + 1
            if number not in scheduled and decoding and tracked.computed < most:
                gone.append(number)
                del self._tracked[number]
        return tuple(gone)

    def _forget_gone(self) -> None:
        """Requests whose worker is through with them."""
        known = {transfer.id for transfer in self._client.transfers()}
        for number, tracked in tuple(self._tracked.items()):
            if tracked.transfer.id not in known and (tracked.hold is None or tracked.hold.over):
                del self._tracked[number]

    @staticmethod
    def _release(tracked: _Tracked | None) -> None:
        if tracked is not None and tracked.hold is not None:
            tracked.hold.release()


def _most(request: Any, prompt: int) -> int | None:
    limit = getattr(request, "max_new_tokens", None)
    return prompt + limit - 1 if isinstance(limit, int) else None
