"""One accepted subscription on the sending side, and the streams that serve it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from pdd_runtime.clock import now
from pdd_runtime.errors import DeadlineExceeded, PddError, RemoteError, TransferError
from pdd_runtime.plugins.transport import Feed, Gone, Ready, Subscription
from pdd_tcp import wire
from pdd_tcp.pacing import Outlet
from pdd_tcp.sockets import Cut

POLL_SECONDS = 0.1
"""How soon a stream that waits for blocks notices that its receiver has left."""


class Session:
    """Its streams share one feed: each takes the next block as soon as it has sent the one before. When the last
    has left, it is to be closed."""

    def __init__(self, feed: Feed, subscription: Subscription, fetch: bytes, beat: float) -> None:
        self.cluster = subscription.cluster
        self._feed, self._subscription, self._beat = feed, subscription, beat
        self._binding = wire.Binding(fetch, subscription.request_id)
        self._until = now() + subscription.deadline
        self._lock = threading.Lock()
        self._unsent = len(subscription.blocks)
        self._streams = 0

    def join(self) -> bool:
        """One stream more; False where the last one has left."""
        with self._lock:
            if self._streams < 0:
                return False
            self._streams += 1
            return True

    def leave(self) -> bool:
        """One stream less; True when it was the last."""
        with self._lock:
            self._streams -= 1
            if self._streams:
                return False
            self._streams = -1
            return True

    def close(self) -> None:
        """Drop all pins."""
        self._feed.close()

    def serve(self, outlet: Outlet, left: Callable[[float], bool]) -> None:
        """Send blocks as they come until the receiver leaves, which `left(seconds)` waits for. Raises `Cut`, and
        whatever the feed raises, after telling the receiver."""
        try:
            self._serve(outlet, left)
        except Cut:
            raise
        except Exception as error:
            payload = wire.pack_error(
                error if isinstance(error, PddError) else RemoteError(f"{type(error).__name__}: {error}")
            )
            outlet.send([self._frame(wire.ERROR, payload), payload])
            outlet.close(flush=True)
            raise

    def _serve(self, outlet: Outlet, left: Callable[[float], bool]) -> None:
        beat_at = now() + self._beat
        while not left(0.0):
            if now() > self._until:
                raise DeadlineExceeded("the deadline of a KV subscription", where=self._subscription.request_id)
            item = self._feed.next(min(POLL_SECONDS, self._beat)) if self._unsent else None
            if isinstance(item, Ready):
                self._send_block(item, outlet)
            elif isinstance(item, Gone):
                self._count()
                outlet.send([self._frame(wire.GONE, index=item.index)])
            elif now() >= beat_at:
                outlet.send([self._frame(wire.BEAT)])
            else:
                # All is sent, but perhaps not all arrived: what another stream loses is asked for in a new session.
                if not self._unsent:
                    left(POLL_SECONDS)
                continue
            beat_at = now() + self._beat

    def _send_block(self, item: Ready, outlet: Outlet) -> None:
        self._count()
        memory = item.memory.cast("B")
        if len(memory) != self._subscription.layout.block_bytes:
            raise TransferError(
                "a block of the wrong size was to be sent",
                where=self._subscription.request_id,
                why=f"{len(memory)} bytes, where the receiver's layout has {self._subscription.layout.block_bytes}",
            )
        header = self._frame(wire.DATA, memory, index=item.index)
        outlet.send([header, memory], functools.partial(self._feed.sent, item.index))

    def _count(self) -> None:
        with self._lock:
            self._unsent -= 1

    def _frame(self, kind: int, payload: bytes | memoryview = b"", *, index: int = 0) -> bytes:
        named = kind in (wire.DATA, wire.GONE)
        bind = self._binding.block(self._subscription.blocks[index].name) if named else self._binding.session
        return wire.pack_frame(kind, bind, block=index, payload=payload)
