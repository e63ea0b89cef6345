"""SGLang's own transfer as a data plane: servers of two modes, and a room for each transfer between two of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, ClassVar, Protocol

from pdd_runtime.errors import EngineError, PddError
from pdd_runtime.graph import Role
from pdd_runtime.ids import new_id
from pdd_runtime.plugins.engine import (
    DecodeRequest,
    Extended,
    Offer,
    OfferRequest,
    PrefillRequest,
    Received,
    ReceiveRequest,
    Sampling,
)
from pdd_runtime.server.cached_pages import CachedPages
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.kv_events import KvEvents
from pdd_runtime.server.native import NativePlane
from pdd_runtime.server.native_request import NativeRequest
from pdd_runtime.server.plane import Look
from pdd_runtime.server.request import Found, Generate, Piece, ServerRequest
from pdd_runtime.waiting import over
from pdd_sglang import requests
from pdd_sglang.config import REPLAY, SglangConfig
from pdd_sglang.rooms import Room, entered, new_room

log = logging.getLogger(__name__)

AHEAD = 2.0
"""Seconds for a prompt's KV to be made before its first token is asked for: then that stands behind it in SGLang's
queue, and no more than the last part of the prompt is computed twice."""
FLUSH = 10.0
"""Seconds for a server to be without requests, so that it can empty its cache."""


class Driven(Protocol):
    """The engine, as the plane needs it."""

    name: ClassVar[str]
    role: Role
    config: SglangConfig

    @property
    def ends(self) -> frozenset[int]: ...

    def stream(
        self, http: HttpClient, body: dict[str, Any], position: int, sampling: Sampling
    ) -> AsyncGenerator[Piece, None]: ...


class Rooms(NativePlane):
    """A prefill server and a decode server are asked at the same time, each with the same tokens and room. So the
    prefill server has to live, and compute what is not cached there, for every decode."""

    def __init__(self, engine: Driven) -> None:
        super().__init__(engine.name, engine.config)
        self._engine = engine
        self._port = 0
        """Where a prefill server is asked for its KV."""

    async def meet(self, http: HttpClient, look: Look, seconds: float) -> None:
        info = await http.get_json("/server_info")
        self._port = (info if isinstance(info, dict) else {}).get("disaggregation_bootstrap_port") or 0
        if self.config.url is not None:
            await self._forget(http)
        await super().meet(http, look, seconds)

    def request(
        self, request: PrefillRequest | DecodeRequest, root: bytes, most: int, generate: Generate
    ) -> ServerRequest:
        if isinstance(request, DecodeRequest):
            self._must_be("decodes", request.id)
            if request.offer is None:
                raise EngineError(
                    "SGLang's decode servers compute no known tokens",
                    where=f"request {request.id}",
                    why="the request brings no offer of their KV",
                )
            room, decode = self._entered(request.offer, request), request
            return Assisted(
                request.id,
                request.tokens,
                lambda id: self._at(room, self._http, id, decode, most, decode.sampling),
                cached=self.cached(root, request.tokens),
                stop_token_ids=request.sampling.stop_token_ids,
            )
        self._must_be("prefills", request.id)
        prefill = request
        return NativeRequest(
            request.id,
            request.tokens,
            lambda id: self._kept(prefill, root, generate, id),
            cached=self.cached(root, request.tokens),
            stop_token_ids=request.sampling.stop_token_ids,
            sealable=False,
        )

    async def offering(self, http: HttpClient, id: str, request: OfferRequest) -> AsyncGenerator[Offer, None]:
        self._must_be("prefills", request.id)
        room = new_room(self._engine.config.transfer_host, self._port, self.digest(request))
        async with self._asked(room, http, id, request) as served:
            yield room.offer()
            await served

    async def receiving(self, http: HttpClient, id: str, request: ReceiveRequest) -> AsyncGenerator[Received, None]:
        self._must_be("decodes", request.id)
        room = self._entered(request.offer, request)
        cached = self.cached(self.root(request.salt), request.tokens)
        async with aclosing(self._at(room, http, id, request, 1, Sampling(temperature=0))) as pieces:
            async for piece in pieces:
                if isinstance(piece, Found):
                    cached = min(cached, piece.tokens)
        yield Received(cached, len(request.tokens) - cached)

    async def follow(self, http: HttpClient) -> None:
        await KvEvents(f"ipc://{self.socket}", f"ipc://{self.socket}{REPLAY}", CachedPages(self.names, self.root)).run()

    async def _kept(
        self, request: PrefillRequest, root: bytes, generate: Generate, id: str
    ) -> AsyncGenerator[Piece, None]:
        """A first token. SGLang keeps no KV of a request without a reader; so one whose reader never comes makes it, is
        waited for, and is given up. The KV is then in SGLang's cache, for the token and for real readers."""
        tokens, size = request.tokens, self.model.layout.block_size
        cached, whole = self.cached(root, tokens), len(tokens) - len(tokens) % size
        async with AsyncExitStack() as made:
            if cached < whole:
                room = new_room(self._engine.config.transfer_host, self._port, "")
                making = await made.enter_async_context(self._asked(room, self._http, new_id("kv"), request))
                if await self.told_of(root, tokens, whole, seconds=AHEAD, while_runs=making):
                    making.cancel()  # it has a place in the batch for as long as it waits
            async with aclosing(generate(id)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Found) and cached < whole:
                        piece = Found(min(piece.tokens, cached))  # what has just been made was not here before
                    yield piece

    @asynccontextmanager
    async def _asked(
        self, room: Room, http: HttpClient, id: str, request: OfferRequest | PrefillRequest
    ) -> AsyncGenerator[asyncio.Task[None], None]:
        """The prefill server is asked, and given up at the end."""

        async def served() -> None:
            async with aclosing(self._at(room, http, id, request, 1, request.sampling)) as pieces:
                async for _ in pieces:
                    pass

        task = asyncio.create_task(served(), name=f"{self.name} {id}")
        try:
            yield task
        finally:
            task.cancel()
            await over(task)
            if not task.cancelled():
                task.exception()  # Who needs it has waited for it.

    async def _at(
        self,
        room: Room,
        http: HttpClient,
        id: str,
        request: PrefillRequest | DecodeRequest | OfferRequest | ReceiveRequest,
        max_tokens: int,
        sampling: Sampling,
    ) -> AsyncGenerator[Piece, None]:
        body = requests.to_room(id, request.tokens, max_tokens, sampling, request.salt, self._engine.ends, room)
        begun = False
        try:
            async with aclosing(self._engine.stream(http, body, len(request.tokens), sampling)) as pieces:
                async for piece in pieces:
                    begun = True
                    yield piece
        except EngineError as error:
            if begun:
                raise
            raise EngineError(
                "no KV has passed from the prefill server to its reader",
                where=f"room {room.room} of {room.host}:{room.port}",
                why=f"{error.what}: {error.why}" if error.why else error.what,
                fix="the servers' logs have more: `pdd-runtime logs`",
            ) from error

    async def _forget(self, http: HttpClient) -> None:
        """Of what a server has cached before we came its events are gone, and names would be of a part of it."""
        try:
            await http.get_text(f"/flush_cache?timeout={FLUSH:g}")
        except PddError as error:
            log.warning("what %s has cached already is not known: %s", http.url, error)

    def _must_be(self, what: str, request: str) -> None:
        role = self._engine.role
        if (role == "prefill") != (what == "prefills"):
            raise EngineError(
                f"a {role} pool's SGLang server does not do that",
                where=f"request {request}",
                why=f"servers that move KV themselves have one part each, and none of {role} {what}",
            )

    def _entered(self, offer: Offer, request: DecodeRequest | ReceiveRequest) -> Room:
        return entered(offer, self.digest(request), request.id)


class Assisted(NativeRequest):
    """A decode: of the known tokens' KV nothing is computed here."""

    async def extended(self) -> Extended:
        # What SGLang says is not less than what was here, but more where the prefill server had more.
        here = self._cached if self.found is None else min(self._cached, self.found)
        return Extended(self.known, 0, 0, self.known - here)
