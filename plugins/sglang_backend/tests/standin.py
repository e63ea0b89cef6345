"""Stand-ins for SGLang servers that exchange KV: as strict as the real ones are, and as lax where those are lax.

Their model's next token comes of the KV that is there, so that wrong KV shows. They listen on real ports, and two of
them exchange through a `Fabric`, which stands for the transfer engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import xxhash
from aiohttp import web
from pdd_sglang import launch
from pdd_sglang.config import NOBODY, REPLAY

from tests.server.publisher import Publisher

VOCAB = 256
PAGES = 256
NO_ROOM = "Invalid request: Disaggregated request received without bootstrap room id."
Kv = tuple[int, ...]
"""What tokens' KV is of: the tokens."""


def next_token(kv: Sequence[int]) -> int:
    return xxhash.xxh64_intdigest(bytes(token % 256 for token in kv)) % VOCAB


def answer(tokens: Sequence[int], n: int) -> tuple[int, ...]:
    """What any right server says after `tokens`."""
    known = list(tokens)
    for _ in range(n):
        known.append(next_token(known))
    return tuple(known[len(tokens) :])


@dataclass
class Transfer:
    """One room."""

    joined: asyncio.Event = field(default_factory=asyncio.Event)
    prefix: int = 0
    """Tokens that the reader has already."""
    sent: asyncio.Future[tuple[Kv, int]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The KV behind them, and the first token."""


class Fabric:
    def __init__(self) -> None:
        self.rooms: dict[tuple[int, int], Transfer] = {}
        self.moved = 0
        """Tokens whose KV has crossed."""

    def room(self, port: int, number: int) -> Transfer:
        return self.rooms.setdefault((port, number), Transfer())


class Aborted(Exception):
    """Its message is SGLang's."""


class StandIn:
    def __init__(
        self, mode: Literal["prefill", "decode"], fabric: Fabric, socket: Path, *, page: int = 16, timeout: float = 5.0
    ) -> None:
        self.mode, self.fabric, self.page, self.timeout = mode, fabric, page, timeout
        self.bootstrap = 0
        self.dead = False
        self.computed = 0
        """Tokens whose KV was made here."""
        self.used = 0
        """Requests that hold something."""
        self.may_compute = asyncio.Event()
        self.may_compute.set()
        self.cache = dict[tuple[str, Kv], int]()
        self.info: dict[str, Any] = {
            "version": "0.5.23",
            "incremental_streaming_output": True,
            "skip_tokenizer_init": True,
            "enable_metrics": True,
            "page_size": page,
            "disaggregation_mode": mode,
            "disaggregation_transfer_backend": "mooncake",
            "disaggregation_decode_allocation_policy": "early",
            "disaggregation_decode_enable_radix_cache": mode == "decode",
            "optimistic_prefill_attempts": launch.ATTEMPTS if mode == "prefill" else 0,
            "dp_size": 1,
            "kv_events_config": json.dumps(launch.events(str(socket))),
        }
        self.publisher = Publisher(socket.parent)
        self.publisher.endpoint, self.publisher.replay = f"ipc://{socket}", f"ipc://{socket}{REPLAY}"
        self.publishes = True
        self._running = dict[str, asyncio.Task[Any]]()

    @asynccontextmanager
    async def listening(self) -> AsyncGenerator[str, None]:
        """Its url."""
        app = web.Application()
        app.add_routes(
            [
                web.get("/ready", self._ready),
                web.get("/server_info", self._info),
                web.get("/v1/loads", self._loads),
                web.get("/flush_cache", self._flush),
                web.post("/generate", self._generate),
                web.post("/abort_request", self._abort),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=1, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        try:
            async with self.publisher:
                await site.start()
                self.bootstrap = self.info["disaggregation_bootstrap_port"] = runner.addresses[0][1]
                yield f"http://127.0.0.1:{self.bootstrap}"
        finally:
            await runner.cleanup()

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.dead else 200)

    async def _info(self, request: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def _loads(self, request: web.Request) -> web.Response:
        load = {"num_running_reqs": self.used, "num_waiting_reqs": 0, "num_used_tokens": self.used * self.page}
        return web.json_response({"loads": [load | {"max_total_num_tokens": PAGES * self.page}]})

    async def _flush(self, request: web.Request) -> web.Response:
        self.cache.clear()
        await self.publisher.publish({"type": "AllBlocksCleared"})
        return web.Response(text="Cache flushed.\n")

    async def _abort(self, request: web.Request) -> web.Response:
        wanted = (await request.json())["rid"]
        for rid, task in tuple(self._running.items()):
            if rid.startswith(wanted):
                task.cancel("Aborted by AbortReq.")
        return web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.dead:
            request.transport.abort()  # type: ignore[union-attr]
            raise web.HTTPServiceUnavailable
        if body.get("bootstrap_room") is None:
            return web.json_response({"error": {"message": f"{NO_ROOM} req.rid={body['rid']!r}"}}, status=400)
        host = body.get("bootstrap_host")
        if self.mode == "decode" and not isinstance(host, str):
            self.dead = True  # its scheduler ends by such a request, and all of it with that
            request.transport.abort()  # type: ignore[union-attr]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        rid = body["rid"]
        work = self._prefill(body) if self.mode == "prefill" else self._decode(body)
        queue = asyncio.Queue[dict[str, Any] | None]()
        task = self._running[rid] = asyncio.create_task(self._run(work, queue))
        self.used += 1
        try:
            while (event := await queue.get()) is not None:
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        finally:
            task.cancel()
            await asyncio.wait([task])
            self.used -= 1
            self._running.pop(rid, None)
        return response

    @staticmethod
    async def _run(work: AsyncGenerator[dict[str, Any], None], queue: asyncio.Queue[dict[str, Any] | None]) -> None:
        try:
            async for event in work:
                queue.put_nowait(event)
        except (Aborted, asyncio.CancelledError) as error:
            finish = {"type": "abort", "message": str(error), "status_code": 500}
            queue.put_nowait(
                {"output_ids": [], "meta_info": {"prompt_tokens": 1, "cached_tokens": 0, "finish_reason": finish}}
            )
        finally:
            queue.put_nowait(None)

    async def _prefill(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        tokens, salt = tuple(body["input_ids"]), body.get("cache_salt") or ""
        await self.may_compute.wait()
        cached = min(self._cached(salt, tokens), (len(tokens) - 1) // self.page * self.page)
        self.computed += len(tokens) - cached
        first = next_token(tokens)
        if body["bootstrap_host"] == NOBODY:
            yield _event([first], len(tokens), cached, {"type": "length", "length": 0})
            return
        await self._keep(salt, tokens)
        room = self.fabric.room(self.bootstrap, body["bootstrap_room"])
        try:
            async with asyncio.timeout(self.timeout):
                await room.joined.wait()
        except TimeoutError:
            raise Aborted(f"Prefill bootstrap failed for request req.rid={body['rid']!r}: timed out") from None
        rest = tokens[room.prefix :]
        self.fabric.moved += -(-len(rest) // self.page) * self.page
        room.sent.set_result((rest, first))
        yield _event([first], len(tokens), cached, {"type": "length", "length": 0})

    async def _decode(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        tokens, salt = tuple(body["input_ids"]), body.get("cache_salt") or ""
        most = body["sampling_params"]["max_new_tokens"]
        if body["bootstrap_host"] == NOBODY:
            # Out of KV that was never written.
            known, first, cached = [0] * len(tokens), 0, 0
        else:
            cached = self._cached(salt, tokens)
            room = self.fabric.room(body["bootstrap_port"], body["bootstrap_room"])
            room.prefix = cached
            room.joined.set()
            try:
                async with asyncio.timeout(self.timeout):
                    rest, first = await asyncio.shield(room.sent)
            except TimeoutError:
                raise Aborted(f"Decode transfer failed for request req.rid={body['rid']!r}: timed out") from None
            # What was sent, whatever it is: nobody compares tokens.
            known = [*tokens[:cached], *rest]
            known += [0] * (len(tokens) - len(known))
        for index in range(most):
            token = first if index == 0 else next_token(known)
            known.append(token)
            finish = {"type": "length", "length": most} if index == most - 1 else None
            if finish and body["bootstrap_host"] != NOBODY:
                await self._keep(salt, (*tokens, *known[len(tokens) : -1]))
            yield _event([token], len(tokens), cached, finish)
            await asyncio.sleep(0)

    def _cached(self, salt: str, tokens: Kv) -> int:
        whole = 0
        while (salt, tokens[: whole + self.page]) in self.cache and whole + self.page <= len(tokens):
            whole += self.page
        return whole

    async def _keep(self, salt: str, tokens: Kv) -> None:
        start = self._cached(salt, tokens)
        parent = self.cache.get((salt, tokens[:start]))
        keys = []
        for end in range(start + self.page, len(tokens) + 1, self.page):
            key = xxhash.xxh64_intdigest(f"{salt} {tokens[:end]}".encode()) >> 1
            self.cache[salt, tokens[:end]] = key
            keys.append(key)
        if keys and self.publishes:
            event = {"type": "BlockStored", "block_hashes": keys, "parent_block_hash": parent, "lora_id": None}
            event |= {"token_ids": tokens[start : start + len(keys) * self.page], "block_size": self.page}
            event |= {"medium": "GPU"} | ({"cache_salt": salt} if salt else {})
            await self.publisher.publish(event)


def _event(ids: list[int], prompt: int, cached: int, finish: dict[str, Any] | None) -> dict[str, Any]:
    meta = {"prompt_tokens": prompt, "cached_tokens": cached, "finish_reason": finish}
    return {"output_ids": ids, "meta_info": meta}
