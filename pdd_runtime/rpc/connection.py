"""The calling side of the message plane."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from types import UnionType
from typing import Any, Protocol, TypeVar, overload

import msgspec

from pdd_runtime.clock import now
from pdd_runtime.errors import ConnectionLost, DeadlineExceeded, PddError, RpcError
from pdd_runtime.rpc.channel import Channel, Heartbeat
from pdd_runtime.rpc.frames import (
    Call,
    Cancel,
    Credit,
    End,
    Failure,
    Frame,
    Hello,
    Item,
    Result,
    encode,
    pack,
    payload_decoder,
)
from pdd_runtime.rpc.greeting import Greeting, refusal
from pdd_runtime.rpc.outbox import Outbox
from pdd_runtime.rpc.reply import Reply
from pdd_runtime.rpc.secured import Secured
from pdd_runtime.rpc.server import LineTo, no_line
from pdd_runtime.rpc.stream import RpcStream
from pdd_runtime.rpc.tls import Tls

T = TypeVar("T")


class Answered(Protocol):
    """A call in flight, as the connection feeds it."""

    def on_item(self, payload: msgspec.Raw) -> None: ...
    def on_result(self, payload: msgspec.Raw) -> None: ...
    def on_end(self) -> None: ...
    def on_failure(self, error: PddError) -> None: ...


class RpcConnection:
    """Many calls at once over one connection; made by `connect`."""

    def __init__(self, channel: Channel, peer: Greeting) -> None:
        self.peer = peer
        """Without its secret."""
        self._channel = channel
        self._ids = itertools.count(1)
        self._calls: dict[int, Answered] = {}
        self._lost = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._lost.is_set()

    async def wait_closed(self) -> None:
        """Return when it can be used no more, whoever closed it."""
        await self._lost.wait()

    @property
    def suspected(self) -> bool:
        """The peer has been silent for a while (`Heartbeat`), or it is closed. Heard again, it is suspected no more."""
        return self._channel.silent.is_set()

    async def wait_suspected(self) -> None:
        """Return when it is suspected; at once where it is."""
        await self._channel.silent.wait()

    async def close(self) -> None:
        """End it; calls in flight end with `ConnectionLost`. Idempotent."""
        self._channel.say_goodbye(None)
        await self._channel.wait_gone()

    async def call(self, method: str, params: object, result: type[T], *, timeout: float) -> T:
        """One request, one answer. Raises what the handler raised (see `RpcServer.unary`), `DeadlineExceeded`,
        `ConnectionLost`, or `RpcError` where the message plane itself failed. Cancelling it cancels the handler."""
        reply = Reply(method, payload_decoder(result))
        packed = pack(params)
        call_id = None
        try:
            async with asyncio.timeout(timeout):
                deadline = now() + timeout
                await self.outbox.room()
                call_id = self.begin(reply, method, packed, max(0.0, deadline - now()), stream=False)
                answer: T = await reply.future
                return answer
        except TimeoutError:
            raise DeadlineExceeded(f"{method} did not answer in {timeout:.3g} s", where=self.where) from None
        finally:
            if call_id is not None:
                self.forget(call_id)
                if not reply.future.done() or reply.future.cancelled():
                    self.send(Cancel(call_id))

    @overload
    def stream(self, method: str, params: object, item: type[T], *, timeout: float | None) -> RpcStream[T]: ...
    @overload
    def stream(self, method: str, params: object, item: UnionType, *, timeout: float | None) -> RpcStream[Any]: ...
    def stream(self, method: str, params: object, item: Any, *, timeout: float | None) -> RpcStream[Any]:
        """One request, a stream of `item`s: a type, or a union of tagged Structs. `timeout` is for the whole
        stream, in seconds. The same errors as `call`, raised where the items are taken."""
        return RpcStream(self, method, pack(params), payload_decoder(item), timeout)

    # For `RpcStream` and the channel.

    @property
    def where(self) -> str:
        return self._channel.where

    @property
    def outbox(self) -> Outbox:
        return self._channel.outbox

    def send(self, frame: Frame) -> None:
        self._channel.send(frame)

    def begin(
        self, answered: Answered, method: str, params: msgspec.Raw, timeout: float | None, *, stream: bool
    ) -> int:
        """Send the call and return its id. Raises `ConnectionLost`; `RpcError` where `params` are too big."""
        if self._channel.error is not None:
            raise self._lost_error(self._channel.error)
        call_id = next(self._ids)
        self.send(Call(call_id, method, params, timeout, stream))
        self._calls[call_id] = answered
        return call_id

    def forget(self, call_id: int) -> None:
        self._calls.pop(call_id, None)

    def frame(self, frame: Frame) -> None:
        if isinstance(frame, Item):
            # Before the others: nearly all are such.
            if answered := self._calls.get(frame.id):
                answered.on_item(frame.payload)
            return
        match frame:
            case Result(call_id, payload):
                if answered := self._calls.pop(call_id, None):
                    answered.on_result(payload)
            case End(call_id):
                if answered := self._calls.pop(call_id, None):
                    answered.on_end()
            case Failure(call_id, error):
                if answered := self._calls.pop(call_id, None):
                    answered.on_failure(PddError.from_wire(error))
            case Hello() | Call() | Credit() | Cancel():
                raise RpcError(f"a server may not send a {type(frame).__name__.lower()} frame")

    def lost(self, error: PddError) -> None:
        self._lost.set()
        calls, self._calls = self._calls, {}
        for answered in calls.values():
            answered.on_failure(self._lost_error(error))

    def _lost_error(self, error: PddError) -> ConnectionLost:
        """One error object a call: each is raised, and gets a traceback, in another task."""
        return ConnectionLost(error.what, where=error.where or self.where, why=error.why, fix=error.fix)


async def connect(
    endpoint: str,
    greeting: Greeting,
    *,
    tls: Tls | None = None,
    line_to: LineTo = no_line,
    timeout: float = 5.0,
    heartbeat: Heartbeat = Heartbeat(),  # noqa: B008 - frozen
) -> RpcConnection:
    """Connect to `host:port` and greet. Raises `ConnectionLost` where nobody listens, `DeadlineExceeded` after
    `timeout` seconds, and `RpcError` where one side refuses the other, saying why. With `tls` both sides show a
    certificate of the graph before anything is said."""
    channel = Channel(heartbeat, endpoint)
    try:
        async with asyncio.timeout(timeout):
            if tls is None:
                await _open(lambda: channel, endpoint)
                return await _greet(channel, greeting, line_to)
            return await _secured(channel, endpoint, greeting, tls, line_to, timeout)
    except TimeoutError:
        channel.abort()
        raise DeadlineExceeded(f"no greeting came in {timeout:.3g} s", where=endpoint) from None
    except BaseException:
        channel.abort()
        raise


async def _secured(
    channel: Channel, endpoint: str, greeting: Greeting, tls: Tls, line_to: LineTo, timeout: float
) -> RpcConnection:
    open_: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def inside(secured: Secured) -> Channel:
        if not open_.done():
            open_.set_result(None)
        return channel

    def refused(secured: Secured, error: PddError) -> None:
        if not open_.done():
            open_.set_exception(error)

    secured = Secured(tls, inside, server=False, timeout=2 * timeout, refused=refused)
    try:
        await _open(lambda: secured, endpoint)
        await open_
        return await _greet(channel, greeting, line_to, secured.cluster)
    except ConnectionLost:
        if secured.trouble is not None:
            raise secured.trouble from None
        raise
    finally:
        if secured.trouble is not None or not open_.done():
            secured.abort()


async def _open(make: Callable[[], asyncio.Protocol], endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise RpcError(f"{endpoint!r} is no endpoint", fix="write host:port")
    try:
        await asyncio.get_running_loop().create_connection(make, host.strip("[]"), int(port))
    except OSError as error:
        raise ConnectionLost("cannot connect", where=endpoint, why=str(error)) from None


async def _greet(channel: Channel, greeting: Greeting, line_to: LineTo, certified: str = "") -> RpcConnection:
    said_at = now()
    hello = Hello(greeting)
    channel.send(hello)
    theirs = await channel.greeting()
    line = line_to(theirs.cluster)
    if line is not None:
        # Only now is it known where the peer is, so only now can our own greeting's way be added.
        _, arrives_at = line.reserve(len(encode(hello)), said_at)
        await asyncio.sleep(arrives_at - said_at)
    if channel.error is not None:
        raise channel.error
    refused = refusal(greeting, theirs, certified)
    if refused is not None:
        channel.say_goodbye(refused)
        await channel.wait_gone()
        raise refused
    peer = theirs.without_secret()
    channel.where = f"{peer.name} at {channel.where}"
    connection = RpcConnection(channel, peer)
    channel.open(connection, line)
    return connection
