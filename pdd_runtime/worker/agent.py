"""The KV agent: moves blocks by name between workers, beside the engine and outside its scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from pdd_runtime.errors import CapacityError, DeadlineExceeded, PddError, TransferError
from pdd_runtime.kv import Block, Conversion, KvLayout, chain, seed
from pdd_runtime.plugins.engine import EngineInfo
from pdd_runtime.plugins.messages import Fetched, FetchEvent, Fetching, FetchProgress, FetchRequest
from pdd_runtime.plugins.transport import BlockSink, Subscription, TransferReport, Transport, Wanted
from pdd_runtime.worker.converting import STAGING, Converter
from pdd_runtime.worker.fetch import Claims, Fetch
from pdd_runtime.worker.sink import FetchSink
from pdd_runtime.worker.source import Source
from pdd_runtime.worker.store import WorkerStore

log = logging.getLogger(__name__)

PROGRESS_PERIOD = 0.05
"""Seconds between two events of progress, at least."""
SLACK = 1.0
"""Seconds a transport has, past its deadline, to end by itself with an error that knows more than ours."""


class Agent:
    """Fetches KV into the store it shares with the engine; `source` gives out what is there."""

    def __init__(
        self,
        store: WorkerStore,
        info: EngineInfo,
        cluster: str,
        source: Source,
        *,
        secret: str,
        staging: int = STAGING,
    ) -> None:
        """`secret`: the graph's, which every source asks for. `staging`: bytes for blocks of other layouts."""
        self.source, self._secret = source, secret
        self._store, self._info, self._cluster = store, info, cluster
        self._converter = Converter(info.layout, staging)
        self._claims: Claims = {}
        self._fetches: set[Fetch] = set()
        self._refusal = ""
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def sessions(self) -> int:
        """Fetches that run or hold their blocks, and feeds."""
        return len(self._fetches) + self.source.feeds

    async def fetch(self, request: FetchRequest, transport: Transport) -> AsyncGenerator[FetchEvent, None]:
        """Have the KV of `request.tokens` here, and hold it until this generator is closed. `Fetching`, now and then
        `FetchProgress`, then `Fetched`. Raises `CapacityError` where no room comes, `DeadlineExceeded`, `LayoutError`
        where the source's KV cannot become ours, and what the transport raises; what has arrived then stays in the
        cache."""
        if self._refusal:
            raise TransferError(self._refusal, where=f"request {request.id}", fix="use another worker")
        deadline = asyncio.get_running_loop().time() + request.timeout
        layout = self._info.layout
        conversion = self._converter.conversion(request.layout or layout)
        fetch = Fetch(self._store, self._claims, self._chain(request, layout), self._discard)
        self._fetches.add(fetch)
        self._idle.clear()
        try:
            fetch.hold_cached()
            yield Fetching(fetch.blocks_here, len(fetch.missing))
            async with _until(deadline, lambda: _late(request, "the blocks that another fetch is bringing")):
                await fetch.claim()
            if fetch.missing:
                async with _until(deadline, lambda: self._full(request, fetch)):
                    await fetch.make_room()
                missing = fetch.missing
                fetch.begin(lambda sink: self._receive(request, transport, conversion, missing, sink, deadline))
                async for event in self._progress(request, fetch, deadline + SLACK):
                    yield event
            report = fetch.report()
            fetch.hold_cached()
            log.info(
                "request %s: %d of %d tokens are here; received %d bytes in %.3f s, %d blocks gone",
                *(request.id, fetch.tokens_here, len(request.tokens), report.bytes, report.seconds, report.gone),
            )
            yield Fetched(report, fetch.tokens_here)
            await asyncio.Event().wait()
        finally:
            fetch.close()
            await fetch.ended()

    def refuse(self, reason: str) -> None:
        """Begin no more fetches."""
        self._refusal = reason

    async def idle(self) -> None:
        """Return when no fetch is open and nobody is subscribed."""
        await self._idle.wait()
        await self.source.idle()

    async def close(self) -> None:
        """End all fetches and feeds."""
        self.refuse("the worker is closing")
        self.source.close()
        for fetch in tuple(self._fetches):
            fetch.close()
            await fetch.ended()
        self._converter.close()

    async def _receive(
        self,
        request: FetchRequest,
        transport: Transport,
        conversion: Conversion | None,
        missing: Sequence[Block],
        sink: FetchSink,
        deadline: float,
    ) -> TransferReport:
        """Bring the missing blocks, straight from the source or by way of a conversion."""

        async def transfer(blocks: Sequence[Block], sink: BlockSink, behind: int = 0) -> TransferReport:
            return await _run(transport, request, self._subscription(request, blocks, behind, deadline), sink)

        if conversion is None:
            return await transfer(missing, sink)
        start, source = missing[0].start, conversion.source
        blocks = self._chain(request, source)[start // source.block_size :]
        return await self._converter.receive(conversion, blocks, start, sink, transfer, deadline)

    def _discard(self, fetch: Fetch) -> None:
        self._fetches.discard(fetch)
        if not self._fetches:
            self._idle.set()

    async def _progress(self, request: FetchRequest, fetch: Fetch, deadline: float) -> AsyncIterator[FetchProgress]:
        """Until the transfer ends."""
        loop = asyncio.get_running_loop()
        told, told_at = 0, 0.0
        while fetch.transferring:
            async with _until(deadline, lambda: _late(request, "the transfer")):
                await fetch.progress.wait()
            fetch.progress.clear()
            pause = told_at + PROGRESS_PERIOD - loop.time()
            if pause > 0:
                await fetch.ended(pause)
            if fetch.transferring and fetch.received > told:
                told, told_at = fetch.received, loop.time()
                yield FetchProgress(told, told * (request.layout or self._info.layout).block_bytes)

    def _chain(self, request: FetchRequest, layout: KvLayout) -> list[Block]:
        """The blocks of the request's tokens, as that layout cuts them."""
        root = seed(self._info.fingerprint, layout.spec, salt=request.salt)
        return chain(root, request.tokens, layout.block_size)

    def _subscription(
        self, request: FetchRequest, blocks: Sequence[Block], behind: int, deadline: float
    ) -> Subscription:
        return Subscription(
            request_id=request.id,
            blocks=tuple(Wanted(block.name, block.tokens) for block in blocks),
            layout=request.layout or self._info.layout,
            fingerprint=self._info.fingerprint,
            epoch=request.epoch,
            cluster=self._cluster,
            secret=self._secret,
            priority=request.priority,
            behind=behind,
            deadline=max(0.0, deadline - asyncio.get_running_loop().time()),
        )

    def _full(self, request: FetchRequest, fetch: Fetch) -> CapacityError:
        used, cached, free, total = self._store.stats
        return CapacityError(
            f"no room for {len(fetch.missing)} blocks of KV came in {request.timeout:g} s",
            where=f"request {request.id}",
            why=f"of {total} blocks {used} are in use, {cached} cached and {free} free",
            fix="wait for requests to end, or give the pool more blocks",
        )


async def _run(
    transport: Transport, request: FetchRequest, subscription: Subscription, sink: BlockSink
) -> TransferReport:
    try:
        return await transport.fetch(request.endpoint, subscription, sink)
    except PddError:
        raise
    except Exception as error:
        log.exception("transport %s crashed", transport.name)
        raise TransferError(
            f"transport {transport.name} crashed: {type(error).__name__}: {error}", where=f"request {request.id}"
        ) from error


def _late(request: FetchRequest, what: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"{what} did not come in {request.timeout:g} s", where=f"request {request.id}")


@asynccontextmanager
async def _until(deadline: float, otherwise: Callable[[], PddError]) -> AsyncIterator[None]:
    """Raise `otherwise()` where the body is not through by `deadline`, on the loop's clock."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise otherwise() from None
