"""One client's connection: HTTP/1.1, written to without detours, and closed on who holds it for nothing."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from pdd_runtime.rpc import SparseLog

log = logging.getLogger(__name__)
_faults = logging.getLogger(f"{__name__}.faults")
_faults.setLevel(logging.INFO)
# uvicorn warns of what clients do wrong, as often as they like; it is told here, less often.
_faults.addFilter(lambda record: record.levelno != logging.WARNING)

KEEP_ALIVE = 30.0
"""Seconds without a request, also before the first."""
HEAD_TIME = 10.0
"""Seconds from the first byte of a request to the end of its header."""
MAX_HEAD = 2**16
"""Bytes of a request's line and header, as in many servers."""
BODY_TIME = 10.0
"""Seconds that a body may take beside those that its bytes take at `BODY_RATE`."""
BODY_RATE = 2**14
"""Bytes a second."""


class Connections:
    """Those of one server."""

    def __init__(self, most: int) -> None:
        """`most`: at once."""
        self.most = most
        self.idle: dict[Protocol, float] = {}
        """Those on which no request is under way, the longest first, and since when, on the loop's clock."""
        self.last = False
        """None is kept open behind its next answer."""
        self.refusals = SparseLog(log)


class Protocol(HttpToolsProtocol):
    """uvicorn's, with a way to write a chunk in the middle of an answer without a coroutine and a message for it: the
    scope's `pdd_socket`, this. And with what uvicorn leaves to a proxy: a request must come in reasonable time and
    size, there are so many connections at most, and requests are not queued behind one that is answered."""

    def __init__(self, *args: Any, connections: Connections, **others: Any) -> None:
        super().__init__(*args, **others)
        self.logger, self.timeout_keep_alive = _faults, KEEP_ALIVE  # type: ignore[assignment]
        self._of = connections
        self._coming: Literal["", "head", "body"] = ""
        """The part of a request that is on its way."""
        self._size = 0
        """Bytes of that part, so far."""
        self._begun = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._surplus = False
        """What comes is another request, while one is being answered: it is dropped."""

    # Its life

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        idle = self._of.idle
        if len(self.connections) > self._of.most:
            if not idle:
                self._refuse(503, "too many connections are open")
                return
            next(iter(idle))._close("it was idle the longest, and the place was needed")
        self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        self._of.idle.pop(self, None)
        self._end_timer()
        # uvicorn does this only where there was no error.
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        self._close(f"nothing came for {self.timeout_keep_alive:g} s")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()
        # What is answered before it was read still has to come in time.
        if not self._coming and not self.transport.is_closing():
            self._rest()

    def _rest(self) -> None:
        """No request is under way."""
        self._of.idle[self] = self.loop.time()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    # What comes

    def data_received(self, data: bytes) -> None:
        self._of.idle.pop(self, None)
        if not self._coming:
            self._comes("head")
        self._size += len(data)
        super().data_received(data)
        if self._coming == "head" and self._size > MAX_HEAD and not self._busy:
            self._refuse(431, f"its header has more than {MAX_HEAD} bytes")
        if self._coming and self._timer is None and not self.transport.is_closing():
            self._timer = self.loop.call_later(HEAD_TIME if self._coming == "head" else BODY_TIME, self._look)

    @property
    def _busy(self) -> bool:
        """A request is being answered, or read."""
        return self.cycle is not None and not self.cycle.response_complete

    def on_message_begin(self) -> None:
        if not self._coming:
            self._comes("head")
        self._surplus = self._busy
        if self._surplus:
            self.cycle.keep_alive = False
            return
        super().on_message_begin()
        self.scope["pdd_socket"] = self  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        if not self._surplus:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._surplus:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._surplus:
            self._end_timer()
            self._comes("body")
            super().on_headers_complete()
            if self._of.last:
                self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        if not self._surplus:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._end_timer()
        self._coming = ""
        if not self._surplus:
            super().on_message_complete()
            if not self._busy:
                self._rest()

    def _comes(self, part: Literal["head", "body"]) -> None:
        self._coming, self._size, self._begun = part, 0, self.loop.time()

    def _look(self) -> None:
        """Is it still coming, and fast enough?"""
        self._timer = None
        if self._coming == "head":
            if self._busy:
                self._timer = self.loop.call_later(HEAD_TIME, self._look)
            else:
                self._refuse(408, f"no whole header in {HEAD_TIME:g} s")
            return
        due = self._begun + BODY_TIME + self._size / BODY_RATE
        if due <= self.loop.time():
            self._refuse(408, f"{self._size} bytes of a body in {self.loop.time() - self._begun:.0f} s")
        else:
            self._timer = self.loop.call_at(due, self._look)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # What goes

    @property
    def full(self) -> bool:
        """Who writes now should wait, as `send` does."""
        return self.flow.write_paused

    def write_chunk(self, data: bytes) -> None:
        """Only once the answer has begun, as chunks. Nothing happens where there is none, or the client has left."""
        if data and not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def abort(self) -> None:
        """End the connection, whatever is still to be written."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "it speaks no HTTP/1.1")

    def _refuse(self, status: int, why: str) -> None:
        """Close it with an answer, where this request has none."""
        if self.transport.is_closing():
            return
        if self._coming != "body" or not self.cycle.response_started:
            text = why.encode()
            self.transport.write(
                b"%bcontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                % (STATUS_LINE[status], len(text), text)
            )
        self._close(why)

    def _close(self, why: str) -> None:
        if not self.transport.is_closing():
            self._of.refusals.warning("connection of %s closed: %s", self.client[0] if self.client else "somebody", why)
            self._of.idle.pop(self, None)
            self._end_timer()
            self.transport.close()
