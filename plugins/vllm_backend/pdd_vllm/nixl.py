"""vLLM's own transfer: one server keeps a prompt's KV for a reader, under a lease, and another pulls it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self

import msgspec

from pdd_runtime.clock import now
from pdd_runtime.errors import EngineError, PddError
from pdd_runtime.plugins.engine import EngineHost, Offer, OfferRequest, Received, ReceiveRequest, Sampling
from pdd_runtime.server.cached_pages import CachedPages
from pdd_runtime.server.geometry import Model
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.kv_events import KvEvents
from pdd_runtime.server.metrics import Metrics
from pdd_runtime.server.native import NativePlane
from pdd_runtime.server.process import free_port
from pdd_vllm import completions
from pdd_vllm.config import REPLAY, VllmConfig

log = logging.getLogger(__name__)

LATE = "vllm:nixl_num_notifications_after_expiry_total"
"""Reads of KV that was not kept any more when they ended: vLLM answers as if nothing had been."""
DEFAULT_PORT = 5600
"""vLLM's own; shown where a start takes any free one."""
_ONE = Sampling(temperature=0)


class NixlPlane(NativePlane):
    """Wrong KV is no error to vLLM: a read that ends after the lease is answered like any other, and what it brought is
    in the reader's cache. So a reader is given half of the lease, by its own clock, and never beyond the lease's end by
    the time of day; a read that took longer has failed, and if it may have brought anything, the server with it."""

    config: VllmConfig

    def __init__(self, name: str, config: VllmConfig) -> None:
        super().__init__(name, config)
        self._port = 0
        self._late: int | None = None
        self._kept: set[asyncio.Future[None]] = set()
        """Of each offer that is open."""

    @property
    def port(self) -> int:
        """Of the side channel. Where any is free, this is known only once the plane is open."""
        return self._port or self.config.nixl_port or DEFAULT_PORT

    async def open(self, host: EngineHost, model: Model, place: Path) -> None:
        await super().open(host, model, place)
        self._port = self.config.nixl_port or free_port()

    def watch(self, metrics: Metrics) -> None:
        """A new reading. The server says how many reads were late, not whose: every offer that is open may be."""
        late = int(metrics.value(LATE))
        if self._late is not None and late > self._late:
            log.error("%s: %d reads ended after their lease", self.name, late - self._late)
            for kept in self._kept:
                if not kept.done():
                    kept.set_result(None)
        self._late = late

    async def offering(self, http: HttpClient, id: str, request: OfferRequest) -> AsyncGenerator[Offer, None]:
        # vLLM's lease begins when it has answered; ours before, so that it never ends later.
        began, ends = now(), time.time() + self.config.lease
        body = completions.request(request.tokens, 1, _ONE, request.salt, self.model.vocab)
        body |= {"stream": False, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        where = f"request {request.id}, for {request.reader}"
        try:
            answer = await http.post_json(completions.PATH, body, timeout=request.timeout)
        except EngineError as error:
            raise EngineError("vLLM keeps no KV for a reader", where=where, why=str(error), fix=error.fix) from error
        params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
        if not isinstance(params, dict) or not params.get("remote_block_ids"):
            raise EngineError("vLLM answers without saying where the KV is", where=where, why=f"{params!r:.200}")
        # The reader would say that it found what this server has found.
        params.pop("remote_prefill_cached_tokens", None)
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._kept.add(kept)
        try:
            yield Offer(msgspec.to_builtins(_Terms(params, self.digest(request), self._time, ends)))
            async with asyncio.timeout(max(0.0, min(request.timeout, self._time) - (now() - began))):
                await kept
        except TimeoutError:
            raise EngineError(
                "the reader has not read the KV in its time",
                where=where,
                why=f"of the lease of {self.config.lease:g} s it has half, from when the KV was asked for",
                fix="raise the pool's lease where the link needs longer",
            ) from None
        finally:
            self._kept.discard(kept)
        raise EngineError(
            "a read ended after its lease, and it may be this one",
            where=where,
            why=f"{LATE} has risen",
            fix="raise the pool's lease",
        )

    async def receiving(self, http: HttpClient, id: str, request: ReceiveRequest) -> AsyncGenerator[Received, None]:
        where = f"request {request.id}"
        terms = _Terms.read(request.offer, where)
        began, left = now(), terms.ends - time.time()
        if terms.of != self.digest(request):
            # To vLLM blocks are numbers: it would take these for whatever it is asked about.
            raise EngineError("the offer is of other tokens, or of another model", where=where)
        here = min(self.cached(self.root(request.salt), request.tokens), self._most(len(request.tokens)))
        body = completions.request(request.tokens, 1, _ONE, request.salt, self.model.vocab)
        body |= {"kv_transfer_params": terms.vllm, "stream_options": {"include_usage": True}}
        seconds = min(request.timeout, terms.seconds, left)
        if seconds <= 0:
            raise _late(where, f"it has ended {-seconds:.1f} s ago")
        try:
            async with asyncio.timeout(seconds):
                found = await self._pull(http, body)
        except TimeoutError:
            raise _late(where, f"nothing has come in {seconds:.1f} s") from None
        except PddError as error:
            raise EngineError("vLLM did not get the KV", where=where, why=str(error), fix=error.fix) from error
        if (took := now() - began) > seconds:
            if took > left:
                self.distrust(where)
            raise _late(where, f"it took {took:.1f} s, and had {seconds:.1f} s")
        if found < len(request.tokens) - 1:
            raise EngineError(
                "vLLM did not get all of the KV", where=where, why=f"of {len(request.tokens)} tokens it has {found}"
            )
        await self.told_of(self.root(request.salt), request.tokens, self._most(len(request.tokens)))
        yield Received(here, len(request.tokens) - here)

    async def follow(self, http: HttpClient) -> None:
        pages = CachedPages(self.names, self.root)
        await KvEvents(events_at(str(self.socket)), replay_at(str(self.socket)), pages).run()

    def distrust(self, where: str) -> None:
        """Wrong KV may be in the server's cache: only a new server is sure to have none."""
        if not self.broken.done():
            self.broken.set_result(
                EngineError("a read of KV ended after its lease, and its server may have kept it", where=where)
            )

    @property
    def _time(self) -> float:
        """Seconds that a reader has."""
        return self.config.lease / 2

    def _most(self, tokens: int) -> int:
        """Of a prompt vLLM finds so many tokens in its cache at most: whole blocks, and not the last token."""
        size = self.model.layout.block_size
        return (tokens - 1) // size * size

    @staticmethod
    async def _pull(http: HttpClient, body: dict[str, Any]) -> int:
        """Have the server make the token behind the prompt; how many tokens it had not to compute for that."""
        made = False
        async with aclosing(http.stream(completions.PATH, body)) as events:
            async for event in events:
                for choice in event["choices"]:
                    made = bool(completions.tokens_of(choice, 0, None)) or made
                if made and event.get("usage"):
                    return completions.cached_of(event["usage"])
        raise EngineError("vLLM made no token behind the prompt")


def events_at(socket: str) -> str:
    """Where a server publishes its cache's events, in ZeroMQ's form."""
    return f"ipc://{socket}"


def replay_at(socket: str) -> str:
    return f"ipc://{socket}{REPLAY}"


class _Terms(msgspec.Struct, frozen=True):
    """What an offer says."""

    vllm: dict[str, Any]
    """vLLM's own parameters."""
    of: str
    """What the KV is of (`digest`)."""
    seconds: float
    """That a reader has."""
    ends: float
    """The lease does, by the time of day."""

    @classmethod
    def read(cls, offer: Offer, where: str) -> Self:
        """Raises `EngineError`."""
        try:
            return msgspec.convert(offer.params, cls)
        except msgspec.ValidationError as error:
            raise EngineError("this is no offer of a vLLM server's", where=where, why=str(error)) from error


def _late(where: str, why: str) -> EngineError:
    return EngineError(
        "the KV has not come within its lease",
        where=where,
        why=why,
        fix="raise the lease of the pool that it comes from; the clocks of both hosts must agree",
    )
