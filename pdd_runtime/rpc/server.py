"""The serving side of the message plane."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import TypeVar

from pdd_runtime.errors import CapacityError, ConnectionLost, PddError, RpcError
from pdd_runtime.hiding import to_hide
from pdd_runtime.rpc.caller import Caller
from pdd_runtime.rpc.channel import Channel, Heartbeat
from pdd_runtime.rpc.context import RpcContext
from pdd_runtime.rpc.execution import Method, StreamMethod, UnaryMethod
from pdd_runtime.rpc.frames import Hello, payload_decoder
from pdd_runtime.rpc.greeting import Greeting, refusal
from pdd_runtime.rpc.line import Line
from pdd_runtime.rpc.secured import Secured
from pdd_runtime.rpc.sparse import SparseLog
from pdd_runtime.rpc.strangers import Strangers, within_files
from pdd_runtime.rpc.tls import Tls

log = logging.getLogger(__name__)

P = TypeVar("P")
LineTo = Callable[[str], Line | None]

GREETING_TIMEOUT = 5.0
MAX_CALLS = 4096
"""In flight on one connection."""
MAX_CONNECTIONS = 4096
MAX_STRANGERS = 512
"""Connections that have not greeted yet. Both are less where the process may have few files open."""


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
        max_connections: int = MAX_CONNECTIONS,
        max_strangers: int = MAX_STRANGERS,
        greeting_timeout: float = GREETING_TIMEOUT,
        heartbeat: Heartbeat = Heartbeat(),  # noqa: B008 - frozen
        hide: Iterable[str] = (),
    ) -> None:
        """`line_to` gives the emulated line to a client's cluster; what is sent there is delayed by it.
        With `tls` only those get as far as a greeting who have a certificate of the graph. `hide`: secrets, which no
        error says to a client, as it does not say the graph's own."""
        self.greeting = greeting
        """May be replaced while it serves: a worker learns its fingerprint late."""
        self._line_to, self._max_calls, self._heartbeat = line_to, max_calls, heartbeat
        self._greeting_timeout, self._tls = greeting_timeout, tls
        self._methods: dict[str, Method] = {}
        self._server: asyncio.Server | None = None
        self._channels: dict[Channel, asyncio.Task[None]] = {}
        self._shaking: set[Secured] = set()
        self._callers: set[Caller] = set()
        self._max_connections = within_files(max_connections, 2)
        self._strangers: Strangers[Secured | Channel] = Strangers(within_files(max_strangers, 8))
        self._refusals = SparseLog(log)
        self._hide = to_hide((greeting.secret, *hide))

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
        self._come(secured)
        return secured

    def _let_in(self, secured: Secured) -> Channel:
        self._shaking.discard(secured)
        self._strangers.know(secured)
        return self._begin(secured.cluster)

    def _refuse(self, secured: Secured, error: PddError) -> None:
        self._shaking.discard(secured)
        if self._strangers.know(secured):
            self._refusals.warning("connection refused: %s", error)

    def _come(self, stranger: Secured | Channel) -> None:
        oldest = self._strangers.come(stranger)
        if oldest is not None:
            # Later: the event loop may not have told it yet that it is connected.
            asyncio.get_running_loop().call_soon(self._give_way, oldest)

    def _give_way(self, oldest: Secured | Channel) -> None:
        self._refusals.warning(
            "connection from %s refused: it has not greeted, and %d others have come",
            oldest.where,
            self._strangers.most,
        )
        oldest.abort()

    def _begin(self, certified: str) -> Channel:
        channel = Channel(self._heartbeat)
        self._come(channel)
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
            self._turn_away(channel, RpcError(f"no greeting came in {self._greeting_timeout:g} s", where=channel.where))
        except ConnectionLost as error:
            log.debug("no greeting: %s", error)
        except PddError as error:
            self._refusals.warning("connection refused: %s", error)
        else:
            try:
                await self._serve_greeted(channel, theirs, certified)
            except Exception:
                log.exception("serving %s failed", channel.where)
                channel.abort()
        await channel.wait_gone()
        self._strangers.know(channel)

    def _turn_away(self, channel: Channel, error: PddError) -> None:
        self._refusals.warning("connection from %s refused: %s", channel.where, error)
        channel.say_goodbye(error)

    async def _serve_greeted(self, channel: Channel, theirs: Greeting, certified: str) -> None:
        line = self._line_to(theirs.cluster)
        refused: PddError | None = refusal(self.greeting, theirs, certified)
        peer = theirs.without_secret()
        if refused is None and len(self._callers) >= self._max_connections:
            refused = CapacityError(
                f"{self.greeting.name or 'the server'} has {self._max_connections} connections",
                where=f"greeting of {peer.name}",
                fix="allow its process more open files (ulimit -n)",
            )
        if refused is not None:
            channel.outbox.line = line
            self._turn_away(channel, refused)
            return
        self._strangers.know(channel)
        channel.where = f"{peer.name} at {channel.where}"
        caller = Caller(channel, peer, self._methods, self._max_calls, self._hide)
        self._callers.add(caller)
        try:
            channel.open(caller, line)
            channel.send(Hello(self.greeting))
            await caller.run()
            if channel.error is not None and channel.error.why:
                log.info("connection of %s ended: %s", peer.name, channel.error)
        finally:
            self._callers.discard(caller)

    def _add(self, name: str, method: Method) -> None:
        if name in self._methods:
            raise ValueError(f"two methods are named {name}")
        self._methods[name] = method
