"""The transport `tcp`: the contract's verbs over threads and sockets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pydantic import BaseModel

from pdd_runtime.errors import TransferError
from pdd_runtime.plugins.transport import (
    BlockSink,
    BlockSource,
    LinkTelemetry,
    Subscription,
    TransferReport,
    Transport,
    TransportContext,
)
from pdd_tcp.config import TcpConfig
from pdd_tcp.encoding import blosc2_missing
from pdd_tcp.incoming import Incoming
from pdd_tcp.pool import Pool
from pdd_tcp.sender import Sender

log = logging.getLogger(__name__)


class TcpTransport(Transport):
    """Bulk KV over TCP. All socket work is done in named threads; the event loop only waits for them."""

    name = "tcp"
    Config = TcpConfig
    encrypts = True

    @classmethod
    def lossless(cls, config: BaseModel) -> bool:
        assert isinstance(config, TcpConfig)
        return config.quantize == "off"

    def __init__(self, config: BaseModel, context: TransportContext) -> None:
        if not isinstance(config, TcpConfig):
            raise TypeError(f"{type(config).__name__} is no TcpConfig")
        super().__init__(config, context)
        self._tcp = _usable(config)
        self._sender = Sender(config, context)
        self._pool = Pool(config, context)
        self._fetches: set[Incoming] = set()
        self._closed = False

    async def serve(self, source: BlockSource, host: str) -> str:
        return await asyncio.to_thread(self._sender.start, source, host)

    async def fetch(self, endpoint: str, subscription: Subscription, sink: BlockSink) -> TransferReport:
        over = asyncio.Event()
        fetch = Incoming(endpoint, subscription, sink, self._tcp, _on_loop(over.set))
        if self._closed:
            raise TransferError("the transport is closed", where=subscription.request_id)
        if not subscription.blocks:
            return TransferReport(bytes=0, blocks=0, gone=0, seconds=0.0)
        alarm = asyncio.get_running_loop().call_later(subscription.deadline, fetch.stop, fetch.late)
        self._fetches.add(fetch)
        try:
            async with self._pool.run(fetch):
                await over.wait()
        finally:
            alarm.cancel()
            self._fetches.discard(fetch)
        report = fetch.result()
        if report.encoding:
            log.info("request %s: KV came as %s", subscription.request_id, report.encoding)
        return report

    def telemetry(self) -> tuple[LinkTelemetry, ...]:
        return self._sender.telemetry()

    async def close(self) -> None:
        self._closed = True
        for fetch in self._fetches:
            fetch.stop("the transport was closed")
        await self._pool.close()
        await asyncio.to_thread(self._sender.close)


def _usable(config: TcpConfig) -> TcpConfig:
    """Without the compression that is not possible here. Raises `PluginError` where it was asked for by name."""
    missing = blosc2_missing() if config.compression != "off" else None
    if missing is not None and config.compression == "blosc2":
        raise missing
    if missing is not None:
        log.warning("pdd-tcp: compression: auto stays off: %s", missing)
        config = config.model_copy(update={"compression": "off"})
    if config.quantize != "off":
        log.warning("pdd-tcp: quantize: %s is lossy: KV is rounded on its way, and tokens may differ", config.quantize)
    return config


def _on_loop(call: Callable[[], object]) -> Callable[[], None]:
    """`call` on this loop, from any thread."""
    loop = asyncio.get_running_loop()

    def tell() -> None:
        try:
            loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The loop is closed, so nobody waits any more.
            if not loop.is_closed():
                raise

    return tell
