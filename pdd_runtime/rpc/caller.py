"""A connected client, as the server sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from pdd_runtime.errors import CapacityError, PddError, RpcError
from pdd_runtime.rpc.channel import Channel
from pdd_runtime.rpc.execution import Execution, Method, StreamMethod, to_wire
from pdd_runtime.rpc.frames import Call, Cancel, Credit, Failure, Frame
from pdd_runtime.rpc.greeting import Greeting

MOST_UNREAD = 16 << 20
"""Bytes of answers that a client may leave unread and go on asking for what is refused."""


class Caller:
    """Holds the calls in flight of one connection; they end with it."""

    def __init__(
        self,
        channel: Channel,
        peer: Greeting,
        methods: Mapping[str, Method],
        max_calls: int,
        hide: Sequence[str] = (),
    ) -> None:
        """`hide`: what no error says to the client."""
        self._channel, self._peer, self._methods, self._max_calls = channel, peer, methods, max_calls
        self._hide = hide
        self._running: dict[int, tuple[Execution, asyncio.Task[None]]] = {}
        self._group = asyncio.TaskGroup()
        self._lost = asyncio.Event()

    @property
    def calls(self) -> int:
        """How many are in flight."""
        return len(self._running)

    async def run(self) -> None:
        """Serve until the connection ends; then cancel what runs and return when all of it has ended."""
        async with self._group:
            await self._lost.wait()
            for _, task in list(self._running.values()):
                task.cancel()

    def frame(self, frame: Frame) -> None:
        match frame:
            case Call():
                self._begin(frame)
            case Credit(call_id, amount):
                if call_id in self._running:
                    self._running[call_id][0].add_credit(amount)
            case Cancel(call_id):
                if call_id in self._running:
                    execution, task = self._running.pop(call_id)
                    execution.cancelled = True
                    task.cancel()
            case _:
                raise RpcError(f"a client may not send a {type(frame).__name__.lower()} frame")

    def lost(self, error: PddError) -> None:
        self._lost.set()

    def _begin(self, call: Call) -> None:
        if call.id in self._running:
            raise RpcError(f"call {call.id} is in flight already")
        try:
            execution = self._execution(call)
        except PddError as error:
            if self._channel.outbox.unread > MOST_UNREAD:
                raise RpcError("the client goes on asking and reads no answer") from error
            self._channel.send(Failure(call.id, to_wire(error, self._hide)))
            return
        task = self._group.create_task(execution.run())
        self._running[call.id] = (execution, task)
        # A task that is cancelled before its first step runs no code of its own: only this callback sees its end.
        task.add_done_callback(lambda _: self._running.pop(call.id, None))

    def _execution(self, call: Call) -> Execution:
        if len(self._running) >= self._max_calls:
            raise CapacityError(
                f"{self._peer.name} has {self._max_calls} calls in flight on one connection",
                where=call.method,
                fix="wait for some to end",
            )
        method = self._methods.get(call.method)
        if method is None:
            raise RpcError(f"there is no method {call.method!r}", where=self._channel.where)
        if isinstance(method, StreamMethod) != call.stream:
            raise RpcError(f"{call.method} is {'unary' if call.stream else 'a stream'}", where=self._channel.where)
        params = method.params.decode(call.params, f"the parameters of {call.method}")
        return Execution(call, method, params, self._channel, self._peer, self._hide)
