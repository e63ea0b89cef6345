"""Blocks that lie otherwise at their source: they land beside the store, and are converted into it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from pdd_runtime.clock import now
from pdd_runtime.errors import Cancelled, leaves
from pdd_runtime.kv import Block, Conversion, KvLayout, Run
from pdd_runtime.plugins.transport import BlockSink, TransferReport
from pdd_runtime.worker.sink import FetchSink
from pdd_runtime.worker.staging import Staging

STAGING = 512 << 20
"""Bytes in which blocks of other layouts land, for all fetches of a worker together."""
AHEAD = 4
"""Parts of one fetch that are under way at once, so that the network does not pause between them."""

Transfer = Callable[[Sequence[Block], BlockSink, int], Awaitable[TransferReport]]
"""Brings these blocks, as the source cuts them, into a sink; so many bytes are asked for later."""


class Converter:
    """What all fetches of a worker share that convert: plans, memory to land in, and the thread that converts.

    A long fetch goes in parts, 32 of which fill the memory. A quarter is kept for short fetches, which would wait for
    seconds behind long ones over a slow line.
    """

    def __init__(self, layout: KvLayout, limit: int = STAGING) -> None:
        self._layout = layout
        self._conversions: dict[KvLayout, Conversion] = {}
        self._short, self._long = Staging(limit // 4), Staging(limit - limit // 4, keep=AHEAD)
        self._most_short, self._part = limit // 64, limit // 32
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-convert")

    @property
    def staged(self) -> int:
        """Bytes that fetches have taken to land in."""
        return self._short.used + self._long.used

    def conversion(self, source: KvLayout) -> Conversion | None:
        """From `source` to the worker's layout; None: they are equal. Raises `LayoutError`."""
        if source == self._layout:
            return None
        if source not in self._conversions:
            self._conversions[source] = Conversion(source, self._layout)
        return self._conversions[source]

    async def receive(
        self,
        conversion: Conversion,
        blocks: Sequence[Block],
        start: int,
        target: FetchSink,
        transfer: Transfer,
        deadline: float,
    ) -> TransferReport:
        """Have `blocks`, as the source cuts them, converted into `target`, the first of whose blocks begins with token
        `start`. Raises what `transfer` raises, and `CapacityError` where no memory to land in came by `deadline`."""
        size = conversion.source.block_bytes
        staging = self._short if len(blocks) * size <= self._most_short else self._long
        step = max(1, self._part // size)
        run = Run(conversion, start, blocks[-1].start + blocks[-1].tokens)
        turn = asyncio.Semaphore(AHEAD)
        reports: list[TransferReport] = []
        times: list[float] = []

        async def receive_part(part: Sequence[Block], behind: int) -> None:
            async with turn:
                if any(report.gone for report in reports):
                    return  # Behind a gap nothing is of use.
                async with staging.take(len(part) * size, deadline) as memory:
                    sink = ConvertingSink(run, part, memory, target, self._thread)
                    times.append(now())
                    try:
                        reports.append(await transfer(part, sink, behind))
                        times.append(now())
                    finally:
                        await sink.end()

        try:
            async with asyncio.TaskGroup() as parts:
                for first in range(0, len(blocks), step):
                    behind = max(0, len(blocks) - first - step) * size
                    parts.create_task(receive_part(blocks[first : first + step], behind))
        except BaseExceptionGroup as group:
            raise (error := next(leaves(group))) from error.__cause__
        return TransferReport(
            bytes=sum(report.bytes for report in reports),
            blocks=sum(report.blocks for report in reports),
            gone=sum(report.gone for report in reports),
            seconds=max(times) - min(times),
            resumed=sum(report.resumed for report in reports),
            over=", ".join(sorted({report.over for report in reports if report.over})),
            encoding=", ".join(sorted({report.encoding for report in reports if report.encoding})),
        )

    def close(self) -> None:
        """When no fetch is left."""
        self._thread.shutdown(wait=False)


class ConvertingSink:
    """The `BlockSink` in front of a fetch's own, for blocks of another layout. Each is converted as soon as it is
    whole, in `thread`."""

    def __init__(
        self, run: Run, blocks: Sequence[Block], memory: memoryview, target: FetchSink, thread: Executor
    ) -> None:
        """`memory`: for `blocks`, one after another."""
        self._run, self._blocks, self._memory, self._target, self._thread = run, blocks, memory, target, thread
        self._size = run.conversion.source.block_bytes
        self._results: list[Future[None]] = []
        self._converting = threading.Lock()
        self._closed = False

    def memory(self, index: int) -> memoryview:
        if self._closed:
            raise Cancelled("the fetch has ended")
        return self._memory[index * self._size : (index + 1) * self._size]

    def done(self, index: int) -> None:
        self._target.received()
        self._results.append(self._thread.submit(self._convert, index))

    async def end(self) -> None:
        """The transport has ended. Returns when all that came is converted, and whoever is cancelled meanwhile waits
        for the block that is just being converted, a matter of milliseconds: then the fetch's memory may be others'."""
        try:
            await asyncio.gather(*(asyncio.wrap_future(result) for result in self._results))
        finally:
            with self._converting:
                self._closed = True

    def _convert(self, index: int) -> None:
        with self._converting:
            if not self._closed:
                for whole in self._run.add(self._blocks[index].start, self.memory(index), self._target.memory):
                    self._target.whole(whole)
