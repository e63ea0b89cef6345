"""The serving side of the message plane."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from pdd_runtime.errors import PddError, RpcError
from pdd_runtime.rpc.caller import Caller
from pdd_runtime.rpc.channel import Channel, Heartbeat
from pdd_runtime.rpc.context import RpcContext
from pdd_runtime.rpc.execution import Method, StreamMethod, UnaryMethod
from pdd_runtime.rpc.frames import Hello, payload_decoder
from pdd_runtime.rpc.greeting import Greeting, refusal
from pdd_runtime.rpc.line import Line
from pdd_runtime.rpc.secured import Secured
from pdd_runtime.rpc.tls import Tls

log = logging.getLogger(__name__)

P = TypeVar("P")
LineTo = Callable[[str], Line | None]

GREETING_TIMEOUT = 5.0
MAX_CALLS = 4096
"""In flight on one connection."""


def no_line(cluster: str) -> Line | None:
    """The network as it is, to every cluster."""
    return None


class RpcServer:
    """Methods by name, for every client that may greet."""

    def __init__(
        self,
        greeting: Greeting,
        line_to: LineTo = no_line,
        *,
        tls: Tls | None = None,
        max_calls: int = MAX_CALLS,
        greeting_timeout: float = GREETING_TIMEOUT,
        heartbeat: Heartbeat = Heartbeat(),  # noqa: B008 - frozen
    ) -> None:
        """`line_to` gives the emulated line to a client's cluster; what is sent there is delayed by it.
        With `tls` only those get as far as a greeting who have a certificate of the graph."""
        self.greeting = greeting
        """May be replaced while it serves: a worker learns its fingerprint late."""
        self._line_to, self._max_calls, self._heartbeat = line_to, max_calls, heartbeat
        self._greeting_timeout, self._tls = greeting_timeout, tls
        self._methods: dict[str, Method] = {}
        self._server: asyncio.Server | None = None
        self._channels: dict[Channel, asyncio.Task[None]] = {}
        self._shaking: set[Secured] = set()
        self._callers: set[Caller] = set()

    def unary(self, method: str, params: type[P], handler: Callable[[P, RpcContext], Awaitable[object]]) -> None:
        """Serve `method`: one request, one answer. What the handler raises reaches the client: a `PddError` as
        it is, anything else as `RemoteError` with its type and message, and here in the log with its traceback.
        It is cancelled at the deadline, when the client cancels, and when the connection is lost."""
        self._add(method, UnaryMethod(payload_decoder(params), handler))

    def stream(
        self, method: str, params: type[P], handler: Callable[[P, RpcContext], AsyncGenerator[object, None]]
    ) -> None:
        """Serve `method`: one request, a stream of items. As `unary`; the generator is also closed, so that its
        `finally` blocks run wherever it stands. It runs at most one item ahead of what the client's credit allows."""
        self._add(method, StreamMethod(payload_decoder(params), handler))

    @property
    def calls(self) -> int:
        """How many are in flight, over all connections."""
        return sum(caller.calls for caller in self._callers)

    async def start(self, host: str, port: int = 0) -> str:
        """Listen; 0: any free port. Returns the endpoint, `host:port`. Raises `RpcError`."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._accept, host, port)
        except OSError as error:
            raise RpcError(
                f"cannot listen on {host}:{port}", why=str(error), fix="choose another port, or 0 for a free one"
            ) from None
        bound = self._server.sockets[0].getsockname()[1]
        return f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"

    async def close(self) -> None:
        """Stop listening, end every call and connection. Idempotent."""
        if self._server is not None:
            self._server.close()
        for secured in self._shaking:
            secured.abort()
        reason = RpcError(f"{self.greeting.name or 'the server'} is closing")
        while self._channels:
            for channel in self._channels:
                channel.say_goodbye(reason)
            await asyncio.wait(self._channels.values())

    def _accept(self) -> asyncio.Protocol:
        if self._tls is None:
            return self._begin("")
        secured = Secured(self._tls, self._let_in, server=True, timeout=self._greeting_timeout, refused=self._refuse)
        self._shaking.add(secured)
        return secured

    def _let_in(self, secured: Secured) -> Channel:
        self._shaking.discard(secured)
        return self._begin(secured.cluster)

    def _refuse(self, secured: Secured, error: PddError) -> None:
        self._shaking.discard(secured)
        log.warning("connection refused: %s", error)

    def _begin(self, certified: str) -> Channel:
        channel = Channel(self._heartbeat)
        task = asyncio.get_running_loop().create_task(self._serve(channel, certified), name="rpc connection")
        self._channels[channel] = task
        task.add_done_callback(lambda _: self._channels.pop(channel))
        return channel

    async def _serve(self, channel: Channel, certified: str) -> None:
        """The whole life of one connection."""
        try:
            async with asyncio.timeout(self._greeting_timeout):
                theirs = await channel.greeting()
        except TimeoutError:
            channel.say_goodbye(RpcError(f"no greeting came in {self._greeting_timeout:g} s", where=channel.where))
        except PddError as error:
            log.debug("no greeting: %s", error)
        else:
            try:
                await self._serve_greeted(channel, theirs, certified)
            except Exception:
                log.exception("serving %s failed", channel.where)
                channel.abort()
        await channel.wait_gone()

    async def _serve_greeted(self, channel: Channel, theirs: Greeting, certified: str) -> None:
        line = self._line_to(theirs.cluster)
        refused = refusal(self.greeting, theirs, certified)
        if refused is not None:
            log.warning("connection from %s refused: %s", channel.where, refused)
            channel.outbox.line = line
            channel.say_goodbye(refused)
            return
        peer = theirs.without_secret()
        channel.where = f"{peer.name} at {channel.where}"
        caller = Caller(channel, peer, self._methods, self._max_calls)
        self._callers.add(caller)
        try:
            channel.open(caller, line)
            channel.send(Hello(self.greeting))
            await caller.run()
        finally:
            self._callers.discard(caller)

    def _add(self, name: str, method: Method) -> None:
        if name in self._methods:
            raise ValueError(f"two methods are named {name}")
        self._methods[name] = method
