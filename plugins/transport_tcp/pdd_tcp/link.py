"""The way to one cluster: what all that is sent there has in common."""

from __future__ import annotations

import logging
import math
import socket
import threading
from collections.abc import Iterable

from pdd_runtime.clock import now
from pdd_runtime.plugins.transport import LinkFacts, LinkTelemetry
from pdd_runtime.rpc import Line
from pdd_tcp import wire
from pdd_tcp.config import TcpConfig
from pdd_tcp.encoding import SLOW_LINK, Encoder, blosc2_missing
from pdd_tcp.meter import Meter
from pdd_tcp.scheduler import Scheduler
from pdd_tcp.session import Block, Piece, Session
from pdd_tcp.sockets import tune_sender, way_of
from pdd_tcp.wire import SMALLEST_FRAME

log = logging.getLogger(__name__)
FRAME_SECONDS = 0.02
"""A frame is on its way over a stream's share of a link for no longer: so long may another one wait for it."""
CHUNK_SECONDS = 0.005
LARGEST_CHUNK = 64 << 10


class Link:
    """`lock` guards all that is sent over it: sessions, scheduler, meter, and what outlets have before them."""

    def __init__(self, cluster: str, facts: LinkFacts | None, line: Line | None, config: TcpConfig) -> None:
        self.cluster, self.facts, self.line = cluster, facts, line
        self.lock = threading.Lock()
        self.meter = Meter()
        self.io_timeout = config.io_timeout
        self._scheduler = Scheduler(config.order, small=int(config.small), ageing=config.ageing)
        self._congestion, self._largest_frame = config.congestion, int(config.frame)
        self._quantize = config.quantize
        self._sockets: set[socket.socket] = set()
        self._retransmits = 0
        """Of connections that are gone."""

    def streams(self, wanted: int) -> int:
        """How many connections a channel gets: one fills an emulated line."""
        return wanted if self.line is None else 1

    def frame(self, streams: int) -> int:
        """Bytes of the frames of a channel with so many connections: a power of two on links, on an emulated line
        what it carries in 5 ms."""
        if self.line is not None:
            chunk = min(LARGEST_CHUNK, int(self.line.bandwidth / 8 * CHUNK_SECONDS))
            return max(SMALLEST_FRAME, min(self._largest_frame, chunk))
        if self.facts is None:
            return self._largest_frame
        most = min(self._largest_frame, int(self.facts.bandwidth / 8 / streams * FRAME_SECONDS))
        return max(SMALLEST_FRAME, 1 << max(0, most.bit_length() - 1))

    def encoder(self, asked: wire.Subscribe) -> Encoder | None:
        """What a receiver gets that asks for it: compression where this side can, quantisation where it agrees."""
        bandwidth = self.line.bandwidth if self.line is not None else self.facts.bandwidth if self.facts else math.inf
        compress = asked.compression == "blosc2" or (asked.compression == "auto" and bandwidth <= SLOW_LINK)
        if compress and (why := blosc2_missing()) is not None:
            log.warning("pdd-tcp: to %s nothing is compressed: %s", self.cluster, why)
            compress = False
        quantize = asked.quantize == self._quantize != "off"
        return Encoder(asked.layout, compress=compress, quantize=quantize) if compress or quantize else None

    def pick(self, sessions: Iterable[Session]) -> Piece | Block | None:
        """Under the lock: the next frame of these, or a block that is to be encoded first."""
        session = self._scheduler.pick([each for each in sessions if each.blocks])
        if session is None:
            return None
        item = session.take()
        if isinstance(item, Piece):
            self._scheduler.sent(session, len(item.view))
        return item

    def encoded(self, block: Block) -> None:
        """Under the lock: it has been, if its session is still there."""
        if not block.session.closed:
            self.meter.dropped(block.session.encoded(block), now())

    def made(self, nbytes: int) -> None:
        """Under the lock: so many bytes more can be sent."""
        self.meter.made(nbytes, now())

    def opened(self, sock: socket.socket, streams: int) -> None:
        """A connection, one of `streams`, sends over this link from now on."""
        tune_sender(sock, self.facts, streams, self._congestion)
        with self.lock:
            self._sockets.add(sock)

    def closing(self, sock: socket.socket) -> None:
        """It does no more; called before it is closed."""
        with self.lock:
            way = way_of(sock)
            self._retransmits += way.retransmits if way is not None else 0
            self._sockets.discard(sock)

    def telemetry(self) -> LinkTelemetry:
        with self.lock:
            ways = [way for way in map(way_of, self._sockets) if way is not None]
            rtts = [way.rtt for way in ways if way.rtt > 0.0]
            return LinkTelemetry(
                cluster=self.cluster,
                goodput=self.meter.goodput,
                # Of an emulated line the kernel knows nothing.
                rtt=min(rtts) + (2 * self.line.delay if self.line is not None else 0.0) if rtts else None,
                queue=self.meter.queue,
                sent=self.meter.sent,
                retransmits=self._retransmits + sum(way.retransmits for way in ways),
            )
