"""What publishes as the servers do, for tests: a number a message, and a replay of what it still has."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio

END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """Listens in `directory` from `async with` on."""

    def __init__(self, directory: Path, keeps: int = 100) -> None:
        """`keeps`: messages that can be replayed."""
        self.endpoint, self.replay = (f"ipc://{directory / name}" for name in ("agent", "agent-replay"))
        self._buffer = deque[tuple[int, bytes]](maxlen=keeps)
        self._number = 0
        self.replays: list[int] = []
        """The first number that each replay asked for."""
        self._replayed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._router = self._context.socket(zmq.ROUTER)
        self._pub.bind(self.endpoint)
        self._router.bind(self.replay)
        self._serving = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._serving.cancel()
        await asyncio.wait({self._serving})
        self._context.destroy(linger=0)

    async def subscribed(self) -> None:
        """Return when somebody is."""
        await self._pub.recv()

    async def replayed(self) -> None:
        """Return when somebody has been answered all that there was."""
        await self._replayed.wait()

    async def publish(self, *events: Any, lost: bool = False, kept: bool = True) -> None:
        """`lost`: subscribers do not get it; `kept`: it can be replayed."""
        payload = msgspec.msgpack.encode([0.0, events, 0])
        if kept:
            self._buffer.append((self._number, payload))
        if not lost:
            await self._pub.send_multipart([b"", self._number.to_bytes(8, "big"), payload])
        self._number += 1

    async def raw(self, payload: bytes) -> None:
        """A message that may be none."""
        await self._pub.send_multipart([b"", self._number.to_bytes(8, "big"), payload])
        self._number += 1

    async def _serve(self) -> None:
        while True:
            who, _, start = await self._router.recv_multipart()
            self.replays.append(int.from_bytes(start, "big"))
            for number, payload in self._buffer:
                if number >= self.replays[-1]:
                    await self._router.send_multipart([who, b"", b"", number.to_bytes(8, "big"), payload])
            await self._router.send_multipart([who, b"", b"", END, b""])
            self._replayed.set()
