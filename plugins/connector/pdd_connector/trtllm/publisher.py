"""Publishes what TensorRT-LLM computes: a thread beside the engine's own, which never waits for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

from pdd_connector.client import AgentClient, Transfer
from pdd_connector.trtllm.pages import Pages

log = logging.getLogger(__name__)

_TICK = 0.1
"""Seconds after which a request is looked at again: nobody says when a worker has ended one."""
LAST_BLOCKS = 2.0
"""Seconds that a request which has ended in the engine waits for blocks that its worker may still be about to give."""


class _Request:
    """One request of the engine, and how far it is published."""

    def __init__(self, transfer: str) -> None:
        self.transfer = transfer
        self.pages: list[int] = []
        self.ready = self.computed = 0
        self.mark: Any = None
        """Behind the pass that computed `ready`."""
        self.copied: int | None = None
        """Tokens; None: not looked at yet."""
        self.published = 0
        """Of these, what the worker was told, or had before."""
        self.ended: float | None = None
        """When its last pass was over, by the monotonic clock."""


class Publisher:
    """Copies the pages of requests into their transfers' blocks.

    `saved` and `end` are called by the engine's thread and return at once. Until `done` the pages must not change.
    """

    def __init__(self, client: AgentClient, pages: Pages) -> None:
        self._client, self._pages = client, pages
        self._requests: dict[int, _Request] = {}
        self._change = threading.Condition()
        self._version = 0
        self._over = False
        self._thread = threading.Thread(target=self._run, name="pdd-publisher", daemon=True)
        self._thread.start()

    def saved(self, request: int, transfer: str, pages: Sequence[int], *, ready: int, computed: int, mark: Any) -> None:
        """Behind `mark` the KV of the first `computed` tokens lies in the request's pages, `pages` being those that are
        new; the first `ready` are to be published."""
        with self._change:
            found = self._requests.get(request)
            if found is None or found.transfer != transfer:
                found = self._requests[request] = _Request(transfer)
            more = ready > found.ready
            found.pages += pages
            found.ready, found.computed, found.mark = ready, computed, mark
            if more:
                self._changed()

    def end(self, request: int) -> None:
        """The engine computes no more for it: publish the rest, and say so."""
        with self._change:
            found = self._requests.get(request)
            if found is not None and found.ended is None:
                found.ready, found.ended = found.computed, time.monotonic()
                self._changed()

    def done(self, request: int) -> bool:
        """Its pages are not read any more."""
        with self._change:
            return request not in self._requests

    def drop(self, request: int) -> None:
        """Its pages will be others': what is being copied of them now is not published."""
        with self._change:
            found = self._requests.pop(request, None)
        if found is not None:
            self._client.finished(found.transfer, found.published)

    def wake(self) -> None:
        """A transfer has more blocks."""
        with self._change:
            self._changed()

    def close(self) -> None:
        with self._change:
            self._over = True
            self._changed()
        self._thread.join()

    def _changed(self) -> None:
        self._version += 1
        self._change.notify()

    def _run(self) -> None:
        while True:
            with self._change:
                if self._over:
                    return
                version, requests = self._version, dict(self._requests)
            # All of them, so that a long prompt holds up no other.
            moved = [self._try(number, request) for number, request in requests.items()]
            if not any(moved):
                self._rest(version, _TICK if requests else None)

    def _rest(self, version: int, seconds: float | None) -> None:
        with self._change:
            self._change.wait_for(lambda: self._version != version, seconds)

    def _try(self, number: int, request: _Request) -> bool:
        try:
            return self._advance(number, request)
        except Exception:
            log.exception("KV could not be published")
            self._close(number, request)
            return True

    def _advance(self, number: int, request: _Request) -> bool:
        """Publish some pages of it, or find that it is over; False where neither."""
        with self._change:
            pages, ready, mark, ended = tuple(request.pages), request.ready, request.mark, request.ended
            computed = request.computed
        with self._client.using(request.transfer) as transfer:
            if transfer is None:
                self._close(number, request)
                return True
            if request.copied is None:
                request.copied = request.published = _start(transfer, self._pages.tokens)
            if transfer.tail is not None:
                ready = min(computed, transfer.tail)
            moved = self._copy(request, request.copied, transfer, pages, ready, mark)
        if moved:
            return self._publish(number, request, request.copied)
        wanted = request.published < ready and transfer.first < len(transfer.blocks)
        if ended is None or (wanted and time.monotonic() < ended + LAST_BLOCKS):
            return False
        self._close(number, request)
        self._client.finished(request.transfer, request.published)
        return True

    def _publish(self, number: int, request: _Request, tokens: int) -> bool:
        with self._change:
            if self._requests.get(number) is not request:
                return True  # dropped: others may have written to the pages as they were read
            request.published = tokens
        self._client.written(request.transfer, tokens)
        return True

    def _copy(
        self, request: _Request, done: int, transfer: Transfer, pages: tuple[int, ...], ready: int, mark: Any
    ) -> bool:
        size = self._pages.tokens
        first = done // size
        end = min(ready, len(transfer.blocks) * size, len(pages) * size, (first + self._pages.group) * size)
        if end <= done:
            return False
        rows = self._pages.read(pages[first : -(-end // size)], mark)
        for index, row in enumerate(rows):
            start = (first + index) * size
            span = slice(max(0, done - start), min(size, end - start))
            self._client.shard(transfer.blocks[first + index])[:, :, span] = row[:, :, span]
        request.copied = end
        return True

    def _close(self, number: int, request: _Request) -> None:
        with self._change:
            if self._requests.get(number) is request:
                del self._requests[number]


def _start(transfer: Transfer, size: int) -> int:
    """Tokens whose KV the worker has before any is published."""
    wanted = transfer.first * size
    return min(wanted, transfer.offered) if transfer.first == len(transfer.blocks) else wanted
