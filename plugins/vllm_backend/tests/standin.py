"""A stand-in for vLLM 0.32 with its NixlConnector, in the test's own process: no arithmetic, but blocks whose content
decides the next token, that others are given when a lease has ended, and that a late reader gets all the same."""

from __future__ import annotations

import asyncio
import hashlib
import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web
from pdd_vllm.config import VllmConfig
from pdd_vllm.nixl import LATE

from tests.server.publisher import Publisher

BLOCKS = 128
_KNOWN = {
    *("prompt", "add_special_tokens", "max_tokens", "stream", "stream_options", "return_token_ids", "ignore_eos"),
    *("stop_token_ids", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "cache_salt"),
    "kv_transfer_params",
}
_TO_READ = {"do_remote_prefill", "remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host"}


class StandIn:
    """One server. Those of one `fleet` reach each other."""

    def __init__(self, directory: Path, fleet: dict[str, StandIn], lease: float, size: int) -> None:
        self.publisher = Publisher(directory)
        self.directory, self.lease, self.size = directory, lease, size
        self.id = f"engine-{len(fleet)}"
        self.fleet = fleet
        fleet[self.id] = self
        self.memory = [b""] * BLOCKS
        """What lies in each block."""
        self._users = [0] * BLOCKS
        self._named: dict[bytes, int] = {}
        """Hash → block, of what can be found; the one used longest ago first."""
        self._kept: dict[str, tuple[list[int], asyncio.TimerHandle]] = {}
        """Request → blocks that are kept for its reader, until the lease ends."""
        self._pulls: set[asyncio.Task[None]] = set()
        self.pulling = asyncio.Event()
        """Reads go on while it is set."""
        self.pulling.set()
        self.late = 0
        self.pulled = 0
        """Tokens that came from others."""
        self.running = 0
        self.bodies: list[dict[str, Any]] = []
        self.understates = 0
        """Tokens that it has and does not count when it says what it had."""

    # What a server is asked

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if unknown := set(body) - _KNOWN:
            return web.json_response({"error": {"message": f"unknown: {unknown}"}}, status=400)
        tokens, params = list(body["prompt"]), body.get("kv_transfer_params") or {}
        held: list[int] = []
        self.running += 1
        try:
            try:
                cached = await self._prompt(held, tokens, body.get("cache_salt", ""), params)
            except _Failed as failed:
                error = {"error": {"message": str(failed), "type": "InternalServerError", "code": 500}}
                return await self._stream(request, [error])
            made = [await self._step(held, tokens, body.get("cache_salt", "")) for _ in range(body["max_tokens"])]
            usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": cached}}
            if body["stream"]:
                events = [{"choices": [{"token_ids": [token], "finish_reason": None}]} for token in made]
                if body.get("stream_options", {}).get("include_usage"):
                    events.append({"choices": [], "usage": usage})
                return await self._stream(request, events)
            answer = {"choices": [{"token_ids": made, "finish_reason": "length"}], "usage": usage}
            if params.get("do_remote_decode"):
                answer["kv_transfer_params"] = self._keep(held, len(body["prompt"]), cached)
                held = []
            return web.json_response(answer)
        finally:
            self.running -= 1
            self._release(held)

    async def metrics(self, request: web.Request) -> web.Response:
        used = sum(1 for users in self._users if users) / BLOCKS
        lines = (
            f"vllm:num_requests_running {self.running}",
            "vllm:num_requests_waiting 0",
            f"vllm:kv_cache_usage_perc {used}",
            f'vllm:cache_config_info{{num_gpu_blocks="{BLOCKS}"}} 1.0',
            f"{LATE} {self.late}",
        )
        return web.Response(text="\n".join(lines) + "\n")

    @property
    def keeps(self) -> int:
        """Requests whose KV is kept for a reader."""
        return len(self._kept)

    async def forget(self) -> None:
        """Its cache is empty."""
        self._named.clear()
        await self.publisher.publish({"type": "AllBlocksCleared"})

    # What it computes

    async def _prompt(self, held: list[int], tokens: Sequence[int], salt: str, params: dict[str, Any]) -> int:
        """Blocks with the prompt's KV; tokens that were not computed."""
        keys = [self._key(tokens[:end], salt) for end in range(self.size, len(tokens), self.size)]
        for key in keys:
            if key not in self._named:
                break
            block = self._named[key] = self._named.pop(key)
            self._users[block] += 1
            held.append(block)
        found = len(held) * self.size
        fresh = [await self._take(held) for _ in range(-(-len(tokens) // self.size) - len(held))]
        if params.get("do_remote_prefill"):
            pull = asyncio.create_task(self._pull(fresh, params))
            self._pulls.add(pull)
            pull.add_done_callback(self._pulls.discard)
            await asyncio.shield(pull)
            self.pulled += len(tokens) - found
            found = len(tokens)
        else:
            for block, start in zip(fresh, range(found, len(tokens), self.size), strict=True):
                self.memory[block] = _kv(tokens[start : start + self.size])
        for index in range(len(held)):
            await self._name(held, index, tokens, salt)
        return found - self.understates

    async def _step(self, held: list[int], tokens: list[int], salt: str) -> int:
        """One token, whose KV the next step makes."""
        made = 3 + zlib.crc32(b"".join(self.memory[block] for block in held)) % 190
        tokens.append(made)
        if len(tokens) > len(held) * self.size:
            self.memory[await self._take(held)] = b""
        self.memory[held[-1]] = self.memory[held[-1]] + _kv([made])
        await self._name(held, len(held) - 1, tokens, salt)
        return made

    async def _pull(self, blocks: list[int], params: dict[str, Any]) -> None:
        """Goes on, and ends, whoever asked for it has left: nothing of it is named then."""
        if lacking := _TO_READ - set(params):
            raise _Failed(f"lacking: {lacking}")
        for block in blocks:
            self._users[block] += 1
        try:
            peer = self.fleet.get(params["remote_engine_id"])
            if peer is None:
                raise _Failed("NIXL handshake failed")
            await self.pulling.wait()
            theirs = params["remote_block_ids"][0]
            for mine, block in zip(blocks, theirs[len(theirs) - len(blocks) :], strict=True):
                self.memory[mine] = peer.memory[block]
            peer.was_read(params["remote_request_id"])
        finally:
            self._release(blocks)

    # Its blocks

    def _keep(self, held: list[int], tokens: int, cached: int) -> dict[str, Any]:
        request = f"cmpl-{len(self.bodies)}"
        timer = asyncio.get_running_loop().call_later(self.lease, self._expire, request)
        self._kept[request] = (held, timer)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [held[: -(-tokens // self.size)]],
            "remote_engine_id": self.id,
            "remote_request_id": request,
            "remote_host": "127.0.0.1",
            "remote_prefill_cached_tokens": cached,
        }

    def _expire(self, request: str) -> None:
        self._release(self._kept.pop(request)[0])

    def was_read(self, request: str) -> None:
        if request not in self._kept:
            self.late += 1
            return
        held, timer = self._kept.pop(request)
        timer.cancel()
        self._release(held)

    def _release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._users[block] -= 1

    async def _take(self, held: list[int]) -> int:
        """One that nobody uses: at best without a name, else the one whose name was used longest ago."""
        named = {block: key for key, block in self._named.items()}
        free = [block for block in range(BLOCKS) if not self._users[block]]
        block = next((block for block in free if block not in named), None)
        if block is None:
            block = next(block for block in self._named.values() if not self._users[block])
            key = named[block]
            del self._named[key]
            await self.publisher.publish({"type": "BlockRemoved", "block_hashes": [key], "medium": "GPU"})
        self._users[block] += 1
        held.append(block)
        return block

    async def _name(self, held: list[int], index: int, tokens: Sequence[int], salt: str) -> None:
        """The block at `index`, if it is full."""
        start, end = index * self.size, (index + 1) * self.size
        key = self._key(tokens[:end], salt)
        if end > len(tokens) or key in self._named:
            return
        self._named[key] = held[index]
        await self.publisher.publish(
            {
                "type": "BlockStored",
                "block_hashes": [key],
                "parent_block_hash": self._key(tokens[:start], salt) if start else None,
                "token_ids": tokens[start:end],
                "block_size": self.size,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [[salt] if salt and not start else None],
                "group_idx": 0,
            }
        )

    @staticmethod
    def _key(tokens: Sequence[int], salt: str) -> bytes:
        return hashlib.sha256(salt.encode() + b"\0" + _kv(tokens)).digest()

    @staticmethod
    async def _stream(request: web.Request, events: Sequence[dict[str, Any]]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


class _Failed(Exception):
    """What was to be loaded was not."""


def _kv(tokens: Sequence[int]) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


async def _version(request: web.Request) -> web.Response:
    return web.json_response({"version": "0.32.0"})


async def _health(request: web.Request) -> web.Response:
    return web.Response()


@asynccontextmanager
async def serving(server: StandIn) -> AsyncGenerator[VllmConfig, None]:
    """Settings of an engine that attaches to it."""
    app = web.Application()
    app.add_routes(
        [
            web.post("/v1/completions", server.completions),
            web.get("/metrics", server.metrics),
            web.get("/version", _version),
            web.get("/health", _health),
        ]
    )
    # A connection that is closed ends what it asked for, as in vLLM.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with server.publisher:
            port = runner.addresses[0][1]
            config = VllmConfig(
                url=f"http://127.0.0.1:{port}",
                socket=server.directory / "agent",
                data_plane="nixl",
                block_size=server.size,
            )
            # Less than the least that a pool may set: tests wait for its end.
            yield config.model_copy(update={"lease": server.lease})
    finally:
        await runner.cleanup()
