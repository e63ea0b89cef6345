"""The sending side of the KV agent: feeds subscribers with blocks as the engine publishes them."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable

from pdd_runtime.errors import LayoutError, TransferError
from pdd_runtime.kv import BlockStore
from pdd_runtime.plugins.engine import EngineInfo
from pdd_runtime.plugins.transport import Subscription
from pdd_runtime.worker.activity import Activity
from pdd_runtime.worker.feed import SourceFeed

GRACE = 10.0
"""Seconds for a request to come to the engine after somebody has subscribed to its blocks."""


class Source:
    """The worker's `BlockSource`. A block that is here is pinned at once; one that is not is waited for as long as
    its request runs here, or has not been seen for `grace` seconds; otherwise it is gone."""

    def __init__(
        self,
        store: BlockStore,
        info: EngineInfo,
        epoch: str,
        activity: Activity,
        *,
        secret: str,
        grace: float = GRACE,
    ) -> None:
        """`secret`: the graph's, which every subscriber must know."""
        self._secret = secret.encode()
        self._store, self._info, self._epoch, self._activity, self._grace = store, info, epoch, activity, grace
        self._loop = asyncio.get_running_loop()
        self._feeds: dict[SourceFeed, asyncio.TimerHandle | None] = {}
        self._waiting: dict[bytes, list[tuple[SourceFeed, int]]] = {}
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._unsubscribe: tuple[Callable[[], None], ...] = (
            store.watch(self._on_block),
            activity.watch(self._on_request),
        )

    @property
    def feeds(self) -> int:
        return len(self._feeds)

    async def idle(self) -> None:
        """Return when nobody is subscribed."""
        await self._idle.wait()

    def open(self, subscription: Subscription) -> SourceFeed:
        """Thread-safe. Raises `LayoutError` or `TransferError` when the two sides do not fit."""
        where = f"KV of request {subscription.request_id}"
        if not hmac.compare_digest(subscription.secret.encode(), self._secret):
            raise TransferError("the subscriber does not know this graph's secret", where=where)
        if subscription.epoch != self._epoch:
            raise TransferError(
                f"the worker of epoch {subscription.epoch} is gone",
                where=where,
                why=f"the one that answers here has epoch {self._epoch}: it was restarted",
            )
        if subscription.fingerprint != self._info.fingerprint:
            raise TransferError(
                f"the two sides serve different models: {subscription.fingerprint} != {self._info.fingerprint}",
                where=where,
                fix="give both pools the same model",
            )
        difference = subscription.layout.difference(self._info.layout)
        if difference is not None:
            raise LayoutError(
                "this worker lays out KV otherwise than the subscriber believes",
                where=where,
                why=f"{difference} (subscriber: {subscription.layout}; here: {self._info.layout})",
                fix="ask with the layout that this worker's member shows in discovery",
            )
        feed = SourceFeed(subscription, self._loop, self._unpin, self._detach)
        self._loop.call_soon_threadsafe(self._attach, feed)
        return feed

    def close(self) -> None:
        """End all feeds."""
        self._closed = True
        for unsubscribe in self._unsubscribe:
            unsubscribe()
        self._unsubscribe = ()
        for feed in self._feeds:
            feed.stop()

    def _attach(self, feed: SourceFeed) -> None:
        if self._closed:
            feed.stop()
            return
        self._feeds[feed] = None
        self._idle.clear()
        for index, wanted in enumerate(feed.subscription.blocks):
            if not self._offer(feed, index, wanted.name):
                self._waiting.setdefault(wanted.name, []).append((feed, index))
        if feed.missing:
            self._judge(feed)

    def _judge(self, feed: SourceFeed) -> None:
        """Whether what is missing may still come."""
        request_id = feed.subscription.request_id
        match self._activity.state(request_id):
            case "ended":
                feed.give_up()
            case "unseen":
                self._feeds[feed] = self._loop.call_later(self._grace, self._on_late, feed)

    def _offer(self, feed: SourceFeed, index: int, name: bytes) -> bool:
        block = self._store.find(name)
        if block is None:
            return False
        self._store.retain((block,))
        feed.offer(index, block, self._store.memory(block))
        return True

    def _on_block(self, name: bytes, added: bool) -> None:
        if added:
            for feed, index in self._waiting.pop(name, ()):
                self._offer(feed, index, name)

    def _on_request(self, request_id: str) -> None:
        if self._activity.state(request_id) == "ended":
            for feed in [feed for feed in self._feeds if feed.subscription.request_id == request_id]:
                feed.give_up()

    def _on_late(self, feed: SourceFeed) -> None:
        if self._activity.state(feed.subscription.request_id) == "unseen":
            feed.give_up()

    def _unpin(self, block: int) -> None:
        self._store.release((block,))

    def _detach(self, feed: SourceFeed) -> None:
        timer = self._feeds.pop(feed, None)
        if timer is not None:
            timer.cancel()
        for wanted in feed.subscription.blocks:
            waiting = self._waiting.get(wanted.name)
            if waiting is not None:
                waiting[:] = [entry for entry in waiting if entry[0] is not feed]
                if not waiting:
                    del self._waiting[wanted.name]
        if not self._feeds:
            self._idle.set()
