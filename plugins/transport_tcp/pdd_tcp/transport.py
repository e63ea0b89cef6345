"""The transport `tcp`: the contract's three verbs over threads and blocking sockets."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

from pydantic import BaseModel

from pdd_runtime.errors import TransferError
from pdd_runtime.plugins.transport import (
    BlockSink,
    BlockSource,
    Subscription,
    TransferReport,
    Transport,
    TransportContext,
)
from pdd_tcp.config import TcpConfig
from pdd_tcp.fetch import Fetch
from pdd_tcp.sender import Sender

FETCHES = 256
"""At once, a thread each; more wait their turn."""
EXTRA_STREAMS = 64
"""Threads for all fetches' further streams together; where none is left, a fetch has one stream."""


class TcpTransport(Transport):
    """Bulk KV over TCP. All socket work is done in named threads; the event loop only waits for them."""

    name = "tcp"
    Config = TcpConfig

    def __init__(self, config: BaseModel, context: TransportContext) -> None:
        if not isinstance(config, TcpConfig):
            raise TypeError(f"{type(config).__name__} is no TcpConfig")
        super().__init__(config, context)
        self._tcp = config
        self._sender = Sender(config, context)
        self._turns = asyncio.Semaphore(FETCHES)
        self._extra_streams = threading.Semaphore(EXTRA_STREAMS)
        self._fetches: set[Fetch] = set()
        self._closed = False
        self._count = 0

    async def serve(self, source: BlockSource, host: str) -> str:
        return await asyncio.to_thread(self._sender.start, source, host)

    async def fetch(self, endpoint: str, subscription: Subscription, sink: BlockSink) -> TransferReport:
        fetch = Fetch(endpoint, subscription, sink, self._tcp, self._extra_streams)
        self._fetches.add(fetch)
        try:
            if self._closed:
                raise TransferError("the transport is closed", where=subscription.request_id)
            return await self._run(fetch, subscription.deadline)
        finally:
            self._fetches.discard(fetch)

    async def _run(self, fetch: Fetch, deadline: float) -> TransferReport:
        loop = asyncio.get_running_loop()
        late = f"the deadline of {deadline:g} s has passed"
        alarm = loop.call_later(deadline, fetch.stop, late)
        try:
            try:
                async with asyncio.timeout(deadline):
                    await self._turns.acquire()
            except TimeoutError:
                raise TransferError("no turn among this worker's fetches", why=late) from None
            try:
                self._count += 1
                return await _in_thread(fetch, f"pdd-tcp-fetch-{self._count}")
            finally:
                self._turns.release()
        finally:
            alarm.cancel()

    async def close(self) -> None:
        self._closed = True
        for fetch in self._fetches:
            fetch.stop("the transport was closed")
        await asyncio.to_thread(self._sender.close)


async def _in_thread(fetch: Fetch, name: str) -> TransferReport:
    """Run `fetch`. However this ends, its thread has ended, and the sink's memory is the caller's again."""
    result: concurrent.futures.Future[TransferReport] = concurrent.futures.Future()

    def run() -> None:
        try:
            result.set_result(fetch.run())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    waiting = asyncio.wrap_future(result)
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
            fetch.stop("the fetch was cancelled")
        except Exception:
            break
    thread.join()
    if cancelled is not None:
        waiting.exception()
        raise cancelled
    return waiting.result()
