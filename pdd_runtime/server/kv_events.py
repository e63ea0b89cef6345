"""What vLLM and SGLang publish of their prefix caches over ZeroMQ, in one format.

A message has three frames: a topic, a number that counts up from 0 (8 bytes, big-endian), and in msgpack an array
`[time, events, …]`. An event is a map with its `type`: `BlockStored`, `BlockRemoved` or `AllBlocksCleared`. Who misses
some sends the number of the first to another socket, which answers with all that it still has and an end, whose number
is -1. As read in vLLM 0.32 (`distributed/kv_events.py`) and SGLang 0.5.23 (`disaggregation/kv_events.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from pdd_runtime.server.cached_pages import CachedPages

log = logging.getLogger(__name__)

LIMIT = 64 << 20
"""Bytes of the largest message: a prompt of a million tokens has a tenth of it."""
REPLAY_TIME = 30.0
"""Seconds from one message of a replay to the next. A server sends them between two steps of its own."""
_ON_DEVICE = (None, "GPU")
"""Where a page lies that needs no loading; vLLM on a CPU says the same."""


class KvEvents:
    """Reads one server's events for as long as `run` runs."""

    def __init__(self, endpoint: str, replay: str, pages: CachedPages, topic: str = "") -> None:
        """`endpoint`, `replay`: where the server publishes and replays, in ZeroMQ's form: `ipc:///path` or
        `tcp://127.0.0.1:PORT`."""
        self._endpoint, self._replay_at, self._pages, self._topic = endpoint, replay, pages, topic
        self._next = 0
        """The number of the message that comes next."""

    async def run(self) -> None:
        """Until cancelled. A server that is not there yet, or is there again, is waited for."""
        with zmq.asyncio.Context() as context, _socket(context, zmq.SUB, self._endpoint) as subscriber:
            subscriber.setsockopt_string(zmq.SUBSCRIBE, self._topic)
            # What was published before we could hear it; a server that has said nothing answers with nothing.
            await self._replay(context)
            heard = -1
            while True:
                number, payload = _read(await subscriber.recv_multipart())
                if number <= heard:
                    log.info("the server's cache begins anew")
                    self._forget(0)
                heard = number
                if number > self._next:
                    await self._replay(context)
                if number > self._next:
                    log.warning("events %d to %d of the server's cache are lost", self._next, number - 1)
                    self._forget(number)
                self._take(number, payload)

    async def _replay(self, context: zmq.asyncio.Context) -> None:
        """All from the next number on that the server still has."""
        with _socket(context, zmq.DEALER, self._replay_at) as asking, suppress(TimeoutError):
            await asking.send_multipart([b"", self._next.to_bytes(8, "big")])
            first = True
            while True:
                async with asyncio.timeout(REPLAY_TIME):
                    frames = await asking.recv_multipart()
                number, payload = _read(frames)
                if number < 0:
                    return
                if first and number > self._next:
                    self._forget(number)
                first = False
                self._take(number, payload)

    def _forget(self, number: int) -> None:
        """What was there is not known any more, up to message `number`."""
        self._pages.clear()
        self._next = number

    def _take(self, number: int, payload: bytes) -> None:
        if number != self._next:
            return  # known from a replay
        self._next += 1
        try:
            for event in msgspec.msgpack.decode(payload)[1]:
                self._apply(event)
        except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError) as error:
            log.warning("event %d of the server's cache cannot be read: %s: %s", number, type(error).__name__, error)
            self._pages.clear()

    def _apply(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self._pages.clear()
        elif event.get("medium") not in _ON_DEVICE or event.get("group_idx") not in (None, 0):
            return
        elif kind == "BlockRemoved":
            self._pages.removed(event["block_hashes"])
        elif kind == "BlockStored" and (salt := _salt(event)) is not None:
            parent: Hashable | None = event.get("parent_block_hash")
            self._pages.stored(event["block_hashes"], parent, event["token_ids"], event["block_size"], salt)


def _socket(context: zmq.asyncio.Context, kind: int, address: str) -> zmq.asyncio.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, LIMIT)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(address)
    return socket


def _read(frames: list[bytes]) -> tuple[int, bytes]:
    """Number and payload; -1 at the end of a replay, and for what is no message."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return -1, b""
    return int.from_bytes(frames[-2], "big", signed=True), frames[-1]


def _salt(event: dict[str, Any]) -> str | None:
    """The tenant's of the first page. None: something else is in the pages' keys (an adapter, a picture), and our names
    have no place for it. vLLM has it, without a word on what it is, among `extra_keys`; SGLang as `cache_salt`."""
    if event.get("lora_id") is not None or event.get("lora_name") is not None:
        return None
    extra = [keys for keys in event.get("extra_keys") or () if keys]
    if not extra:
        return event.get("cache_salt") or ""
    first = (event["extra_keys"] or (None,))[0]
    if len(extra) > 1 or first is None or len(first) != 1 or not isinstance(first[0], str):
        return None
    return str(first[0])
