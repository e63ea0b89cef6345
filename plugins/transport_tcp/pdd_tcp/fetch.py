"""One fetch on the receiving side: attempts, until every block has come or is gone."""

from __future__ import annotations

import threading

import msgspec

from pdd_runtime.clock import now
from pdd_runtime.errors import TransferError
from pdd_runtime.plugins.transport import BlockSink, Subscription, TransferReport
from pdd_tcp.attempt import Attempt, Damaged
from pdd_tcp.config import TcpConfig
from pdd_tcp.sockets import Cut

DAMAGES = 8
"""Frames of one fetch that may come damaged; a line or a host that spoils more is to be repaired, not retried."""


class Fetch:
    def __init__(
        self,
        endpoint: str,
        subscription: Subscription,
        sink: BlockSink,
        config: TcpConfig,
        extra_streams: threading.Semaphore,
    ) -> None:
        """Raises `TransferError` for an endpoint that is none."""
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            raise TransferError(f"{endpoint!r} is no endpoint", fix="give it as host:port")
        self._address = (host.removeprefix("[").removesuffix("]"), int(port))
        self._endpoint, self._subscription, self._sink = endpoint, subscription, sink
        self._config, self._extra_streams = config, extra_streams
        self._lock = threading.Lock()
        self._missing = dict.fromkeys(range(len(subscription.blocks)))
        self._blocks = self._gone = 0
        self._stopped = threading.Event()
        self._why_stopped = ""
        self._attempt: Attempt | None = None
        self._trouble = ""

    def run(self) -> TransferReport:
        """Blocks until all is here. Raises `TransferError`, or what the sender refused with. When it returns or
        raises, no thread touches the sink any more."""
        begun = now()
        until = begun + self._subscription.deadline
        accepted, damages, delay = 0, 0, self._config.retry_delay
        while self._missing:
            left = len(self._missing)
            attempt = self._next_attempt(until)
            try:
                attempt.run()
            except Cut as cut:
                if not self._stopped.is_set():
                    self._trouble = str(cut)
                damages += isinstance(cut, Damaged)
            if damages > DAMAGES:
                raise self._failed(f"{damages} frames came damaged")
            accepted += attempt.accepted
            if len(self._missing) < left:
                delay = self._config.retry_delay
            if self._missing and not self._stopped.wait(delay):
                delay = min(2 * delay, self._config.retry_delay_max)
        return TransferReport(
            bytes=self._blocks * self._subscription.layout.block_bytes,
            blocks=self._blocks,
            gone=self._gone,
            seconds=now() - begun,
            resumed=max(0, accepted - 1),
        )

    def stop(self, why: str) -> None:
        """Any thread: make `run` end soon, by a `TransferError` unless it has just finished."""
        with self._lock:
            if self._stopped.is_set():
                return
            self._why_stopped = why
            self._stopped.set()
            attempt = self._attempt
        if attempt is not None:
            attempt.end(Cut(why))

    def _next_attempt(self, until: float) -> Attempt:
        with self._lock:
            if self._stopped.is_set():
                raise self._failed(self._why_stopped)
            numbers = list(self._missing)
            subscription = msgspec.structs.replace(
                self._subscription,
                blocks=tuple(self._subscription.blocks[number] for number in numbers),
                deadline=max(0.001, until - now()),
            )
            self._attempt = Attempt(
                self._address, subscription, numbers, self._sink, self._settle, self._config, self._extra_streams
            )
            return self._attempt

    def _settle(self, number: int, there: bool) -> None:
        """A block has come, or will not."""
        if there:
            self._sink.done(number)
        with self._lock:
            del self._missing[number]
            self._blocks += there
            self._gone += not there

    def _failed(self, why: str) -> TransferError:
        done, total = self._blocks + self._gone, len(self._subscription.blocks)
        trouble = f"; last trouble: {self._trouble}" if self._trouble else ""
        return TransferError(
            f"{total - done} of {total} blocks did not come from {self._endpoint}",
            where=self._subscription.request_id,
            why=why + trouble,
            fix="see the sender's log; what arrived is kept, and a new fetch asks for the rest",
        )
