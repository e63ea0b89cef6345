"""The connector in a worker of vLLM: copies KV between the engine's pages and the blocks of the worker beside it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pdd_connector.client import AgentClient
from pdd_connector.vllm.pages import Copier, Saved
from pdd_connector.vllm.step import Load, Pages, Step

log = logging.getLogger(__name__)


class _Request:
    """A transfer that has pages."""

    def __init__(self) -> None:
        self.pages: list[int] = []
        self.saved = 0
        """The KV of so many leading tokens lies in blocks, or is on its way there."""
        self.valid: int | None = None
        """Behind a load that failed: only so many leading tokens' KV is right, until the engine has computed the rest
        anew."""


class WorkerSide:
    """Called in the engine's thread: `begin`, `load` and `save` once a step each, in this order, with one `Step`."""

    def __init__(self, client: AgentClient, copier: Copier) -> None:
        self._client, self._copier = client, copier
        self._size = client.block_size
        self._requests: dict[str, _Request] = {}
        self._failed: set[int] = set()
        self._doubtful: set[str] = set()
        """Transfers that the step under way computes with pages that are not right."""

    def begin(self, step: Step) -> None:
        """Before the pages of what has finished are written by others."""
        finished = [(id, self._requests.pop(id, None), tokens) for id, tokens in step.finished.items()]
        for id, pages in step.pages.items():
            self._place(id, pages)
        for id, request, tokens in finished:
            try:
                self._finish(id, request, tokens)
            except Exception:
                log.exception("the end of request %s was not published", id)
        self._copier.fence()

    def load(self, step: Step) -> None:
        """Before anything is computed with what was offered."""
        for load in step.loads:
            try:
                done = self._load(load)
            except Exception:
                log.exception("the KV of request %s was not loaded", load.id)
                done = False
            if not done:
                self._lose(load)
            self._client.loaded(load.id, load.end - load.start if done else 0)
        if self._failed:
            self._doubt(step)

    def save(self, step: Step) -> None:
        """After the step was computed, or asked of the device."""
        for id, (before, after) in step.computed.items():
            if id in self._doubtful:
                continue
            try:
                self._follow(id, before, after)
            except Exception:
                log.exception("KV of request %s was not published", id)
        self._doubtful.clear()

    def failed(self) -> set[int]:
        """The pages that are not right, since a load did not fill them or one before; the engine computes them anew."""
        failed, self._failed = self._failed, set()
        return failed

    def _place(self, id: str, pages: Pages) -> None:
        request = self._requests.setdefault(id, _Request())
        request.pages[pages.start :] = pages.numbers

    def _load(self, load: Load) -> bool:
        """Whether all of it is in its pages."""
        pages = self._requests[load.id].pages
        with self._client.using(load.id) as transfer:
            if transfer is None or transfer.offered < load.end:
                return False
            where = range(load.start // self._size, -(-load.end // self._size))
            blocks = [self._client.shard(transfer.blocks[index]) for index in where]
            tokens = [min(self._size, load.end - index * self._size) for index in where]
            self._copier.load([pages[index] for index in where], blocks, tokens)
        return True

    def _follow(self, id: str, before: int, after: int) -> None:
        """Publish what has become whole."""
        request, transfer = self._requests.get(id), self._client.request(id)
        if request is None or transfer is None:
            return
        if request.valid is not None:
            if before > request.valid:
                return
            request.valid = None
        # The tail of what was known at first is wanted at once; any other when its page is full, or the request over.
        whole = after if after == transfer.tokens else after // self._size * self._size
        self._save(id, request, min(whole, len(transfer.blocks) * self._size))

    def _lose(self, load: Load) -> None:
        """Its pages are not filled, so none behind them will be right either."""
        request = self._requests[load.id]
        request.valid = load.start
        self._failed.update(request.pages[load.start // self._size :])

    def _doubt(self, step: Step) -> None:
        """Whatever this step computes with a page that was not filled is wrong, in whichever request: the engine will
        compute it anew."""
        for id, (before, _) in step.computed.items():
            request = self._requests.get(id)
            if request is None or not self._failed.intersection(request.pages):
                continue
            self._doubtful.add(id)
            if request.valid is None:
                request.valid = before
                self._failed.update(request.pages[before // self._size :])

    def _finish(self, id: str, request: _Request | None, tokens: int) -> None:
        transfer = self._client.request(id)
        if request is not None and transfer is not None:
            tokens = tokens if request.valid is None else min(tokens, request.valid)
            self._save(id, request, min(tokens, len(transfer.blocks) * self._size, len(request.pages) * self._size))
        saved = 0 if request is None else request.saved
        # In the order of the copies, of which some may be on their way.
        self._copier.save((), lambda _: self._client.finished(id, saved))

    def _save(self, id: str, request: _Request, tokens: int) -> None:
        """Bring the first `tokens` tokens into the blocks, where they are not yet."""
        transfer = self._client.request(id)
        if transfer is None or tokens <= request.saved:
            return
        where = range(max(transfer.first, request.saved // self._size), -(-tokens // self._size))
        request.saved = tokens
        pages = [request.pages[index] for index in where]
        self._copier.save(pages, lambda saved: self._deliver(id, saved, where, tokens))

    def _deliver(self, id: str, saved: Saved, where: Sequence[int], tokens: int) -> None:
        with self._client.using(id) as transfer:
            if transfer is None:
                return
            for order, index in enumerate(where):
                block = self._client.shard(transfer.blocks[index])
                saved.copy(order, block, min(self._size, tokens - index * self._size))
        self._client.written(id, tokens)
