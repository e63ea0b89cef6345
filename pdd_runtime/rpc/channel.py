"""The channel: one TCP connection that carries frames, the same on both sides."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Protocol, cast

import msgspec

from pdd_runtime.errors import ConnectionLost, PddError, RpcError
from pdd_runtime.rpc.frames import FRAME_LIMIT, GREETING_LIMIT, Bye, Frame, FrameDecoder, Hello, Item, Ping
from pdd_runtime.rpc.greeting import Greeting
from pdd_runtime.rpc.line import Line
from pdd_runtime.rpc.outbox import Outbox

log = logging.getLogger(__name__)

LINGER = 1.0
"""Seconds a side that said goodbye waits for the other to close, so that the reason is read before a reset."""


class Heartbeat(msgspec.Struct, frozen=True):
    """A killed process is noticed at once, by its closed sockets; this notices a silent one."""

    interval: float = 0.5
    """Seconds between signs of life."""
    suspected_after: float = 1.5
    """Seconds of silence after which others are better asked."""
    dead_after: float = 5.0
    """Seconds of silence. Long, because a worker whose cores are busy is not dead."""


class Receiver(Protocol):
    """Who takes the frames once both sides have greeted."""

    def frame(self, frame: Frame) -> None:
        """Raises `RpcError` where the peer breaks the protocol; the connection is then closed."""
        ...

    def lost(self, error: PddError) -> None:
        """Called once; no frame comes any more and none can be sent."""
        ...


class Channel(asyncio.Protocol):
    """Reads and writes frames, keeps the peer alive, says goodbye with a reason."""

    def __init__(self, heartbeat: Heartbeat, where: str = "") -> None:
        self.where = where
        """Who is at the other end, for messages."""
        self.error: PddError | None = None
        """Why it cannot be used any more."""
        self.silent = asyncio.Event()
        """Nothing has come from the peer of late, or nothing comes any more."""
        self._heartbeat = heartbeat
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._decoder = FrameDecoder(GREETING_LIMIT)
        self._hello: asyncio.Future[Greeting] = self._loop.create_future()
        self._receiver: Receiver | None = None
        self._gone = asyncio.Event()
        self._silent_beats = 0
        self._beat: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None

    async def greeting(self) -> Greeting:
        """The peer's greeting. Raises why it did not come."""
        return await self._hello

    def open(self, receiver: Receiver, line: Line | None) -> None:
        """Both have greeted: frames go to `receiver`, and out over `line`."""
        self.outbox.line = line
        self._decoder.limit = FRAME_LIMIT
        self._receiver = receiver
        if self.error is not None:
            receiver.lost(self.error)
        else:
            self._beat = self._loop.call_later(self._heartbeat.interval, self._on_beat)

    def send(self, frame: Frame) -> None:
        """Never blocks; see `Outbox.send`. On a lost channel it does nothing."""
        self.outbox.send(frame)

    def say_goodbye(self, error: PddError | None) -> None:
        """Tell the peer why, and take nothing more from it. It closes, or is cut off after a moment."""
        if self.error is not None:
            return
        self.send(Bye(error.to_wire() if error else None))
        self.outbox.finish()
        delay = self.outbox.line.delay if self.outbox.line else 0.0
        self._linger = self._loop.call_later(LINGER + 2 * delay, self.abort)
        self._lose(error or ConnectionLost("the connection was closed on this side", where=self.where))

    def abort(self) -> None:
        """Close at once; what has not left is dropped."""
        if self._transport is not None:
            self._transport.abort()

    async def wait_gone(self) -> None:
        """Return when the socket is closed."""
        await self._gone.wait()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._transport = transport = cast(asyncio.Transport, transport)
        self.outbox = Outbox(transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not self.where:
            # None where the peer has gone already.
            host, port = (transport.get_extra_info("peername") or ("?", 0))[:2]
            self.where = f"{host}:{port}"

    def data_received(self, data: bytes) -> None:
        if self._silent_beats:
            self._silent_beats = 0
            if self.error is None:
                self.silent.clear()
        if self.error is not None:
            return
        try:
            for frame in self._decoder.feed(data):
                if isinstance(frame, Item) and self._receiver is not None:
                    # Nearly all are such.
                    self._receiver.frame(frame)
                else:
                    self._take(frame)
                if self.error is not None:
                    return
        except RpcError as error:
            error = RpcError(error.what, where=error.where or self.where, why=error.why, fix=error.fix)
            if self._hello.done():  # Else who waits for it is told.
                log.warning("connection closed: %s", error)
            self.say_goodbye(error)

    def pause_writing(self) -> None:
        self.outbox.pause()

    def resume_writing(self) -> None:
        self.outbox.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(ConnectionLost("the peer went away", where=self.where, why=str(exc) if exc else ""))
        self.outbox.close()
        if self._linger is not None:
            self._linger.cancel()
        self._gone.set()

    def _take(self, frame: Frame) -> None:
        match frame:
            case Ping():
                pass
            case Bye(error):
                self._on_bye(PddError.from_wire(error) if error else None)
            case Hello(greeting) if not self._hello.done():
                self._hello.set_result(greeting)
            case _ if self._receiver is not None:
                self._receiver.frame(frame)
            case _:
                raise RpcError(f"the peer sent a {type(frame).__name__.lower()} frame out of turn")

    def _on_bye(self, error: PddError | None) -> None:
        if error is None:
            self._lose(ConnectionLost("the peer closed the connection", where=self.where))
        elif self._receiver is None:
            self._lose(error)
        else:
            self._lose(
                ConnectionLost("the peer closed the connection", where=self.where, why=error.what, fix=error.fix)
            )
        self.abort()

    def _lose(self, error: PddError) -> None:
        if self.error is not None:
            return
        self.error = error
        self.silent.set()
        if self._beat is not None:
            self._beat.cancel()
        if not self._hello.done():
            self._hello.set_exception(error)
            self._hello.exception()  # Retrieved: nobody needs to ask for the greeting of a lost channel.
        if self._receiver is not None:
            self._receiver.lost(error)

    def _on_beat(self) -> None:
        # Beats are counted, not seconds: a stall of this process must not make its peers look dead.
        self._silent_beats += 1
        silence = self._silent_beats * self._heartbeat.interval
        if silence > self._heartbeat.suspected_after and not self.silent.is_set():
            log.info("%s has been silent for %.3g s", self.where, self._heartbeat.suspected_after)
            self.silent.set()
        if silence > self._heartbeat.dead_after:
            self._lose(
                ConnectionLost("the peer fell silent", where=self.where, why=f"{self._heartbeat.dead_after} s unheard")
            )
            self.abort()
            return
        self.send(Ping())
        self._beat = self._loop.call_later(self._heartbeat.interval, self._on_beat)
