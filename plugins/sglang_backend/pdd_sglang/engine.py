"""SGLang behind the engine contract: a stock server, driven in token IDs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from msgspec import structs
from pydantic import BaseModel

from pdd_runtime.errors import EngineError, PddError
from pdd_runtime.models.tokenizer import from_directory
from pdd_runtime.plugins.engine import Capabilities, ModelSpec, Sampling
from pdd_runtime.server.engine import ServerEngine
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.launch import Launch
from pdd_runtime.server.metrics import Metrics
from pdd_runtime.server.plane import DataPlane, Readings
from pdd_runtime.server.request import Found, Piece
from pdd_runtime.server.version import check_tried
from pdd_sglang import launch, requests
from pdd_sglang.config import SglangConfig
from pdd_sglang.native import Rooms

log = logging.getLogger(__name__)

TRIED = ("0.5.23",)
"""The versions whose linker interface and own transfer were tried: they move from one to the next."""
ABORT_TIME = 5.0
"""Seconds for SGLang to take note of an abort."""
_Needs = dict[str, tuple[tuple[object, ...], str]]
"""Settings of a server that was started by others, what they may be, and how that is said."""
_NEEDS: _Needs = {
    "incremental_streaming_output": ((True,), "--incremental-streaming-output"),
    "skip_tokenizer_init": ((True,), "--skip-tokenizer-init"),
    "enable_metrics": ((True,), "--enable-metrics"),
}
_SHARES: _Needs = {
    "enable_unified_cache_external_linker": ((True,), "--enable-unified-cache-external-linker"),
    "page_size": ((1,), "--page-size 1"),
    "disaggregation_mode": (("null",), "no --disaggregation-mode"),
}


class SglangEngine(ServerEngine):
    name = "sglang"
    Config: ClassVar[type[BaseModel]] = SglangConfig
    config: SglangConfig
    health = "/ready"

    @classmethod
    def promises(cls, model: ModelSpec, config: BaseModel) -> Capabilities:
        assert isinstance(config, SglangConfig)
        # Penalties and grammars would have to count the output that was made elsewhere, and SGLang takes that for
        # prompt; min_tokens needs the tokenizer that we do without.
        able = Capabilities(logprobs=True, logit_bias=True)
        return structs.replace(able, extend="prefill_assisted", kv="native", fan_out=False) if config.native else able

    def plane(self) -> DataPlane:
        return Rooms(self) if self.config.native else super().plane()

    def launch(self, model: Path, port: int, socket: str) -> Launch:
        return launch.server(self.config, self.model, model, port, socket, self.role)

    async def inspect(self, http: HttpClient) -> Capabilities:
        answer = await http.get_json("/server_info")
        info: dict[str, Any] = answer if isinstance(answer, dict) else {}
        version = str(info.get("version") or "")
        check_tried("SGLang", version, TRIED, http.url)
        needs = _NEEDS | (self._transfers() if self.config.native else _SHARES)
        for name, (values, flag) in needs.items():
            if info.get(name) not in values:
                raise EngineError(
                    "the SGLang server was started otherwise than the worker needs it",
                    where=http.url,
                    why=f"{name} is {info.get(name)}, not {values[0]}",
                    fix=f"start it with {flag}; `pdd-runtime render engine` prints the whole command line",
                )
        return self.promises(self.model, self.config)

    async def generate(
        self, http: HttpClient, id: str, tokens: Sequence[int], max_tokens: int, sampling: Sampling, salt: str
    ) -> AsyncGenerator[Piece, None]:
        if self.config.native:
            body = requests.to_nobody(id, tokens, sampling, salt, self.ends)
        else:
            body = requests.body(id, tokens, max_tokens, sampling, salt, self.ends)
        async with aclosing(self.stream(http, body, len(tokens), sampling)) as pieces:
            async for piece in pieces:
                yield piece

    async def stream(
        self, http: HttpClient, body: dict[str, Any], position: int, sampling: Sampling
    ) -> AsyncGenerator[Piece, None]:
        """As `generate`, of a request that is written."""
        begun, ended = False, False
        try:
            async with aclosing(http.stream(requests.PATH, body)) as events:
                async for event in events:
                    answer = requests.answer(event, position, sampling.logprobs)
                    ended = answer.finished
                    if not begun:
                        begun = True
                        yield Found(answer.cached)
                    if answer.tokens:
                        position += len(answer.tokens)
                        yield answer.tokens
        finally:
            if not ended:
                await self._abort(http, body["rid"])

    def readings(self, metrics: Metrics) -> Readings:
        return Readings(int(metrics.value("sglang:num_running_reqs")), int(metrics.value("sglang:num_queue_reqs")))

    async def look(self, http: HttpClient) -> Readings:
        if not self.config.native:
            return await super().look(http)
        # Metrics of a server that only waits for KV are old ones.
        return requests.load(await http.get_json(requests.LOADS), self.config.block_size)

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that SGLang takes for the model's ends."""
        return frozenset(from_directory(self._path).eos_token_ids)

    def _transfers(self) -> _Needs:
        config, backend = self.config, self.config.data_plane
        needs: _Needs = {
            "page_size": ((config.block_size,), f"--page-size {config.block_size}"),
            "disaggregation_mode": ((mode := launch.mode(self.role),), f"--disaggregation-mode {mode}"),
            # SGLang calls mooncake_tcp so, when it has seen to it that it is without RDMA.
            "disaggregation_transfer_backend": (
                (backend, backend.removesuffix("_tcp")),
                f"--disaggregation-transfer-backend {backend}",
            ),
            "disaggregation_decode_allocation_policy": (("early",), "no --disaggregation-decode-allocation-policy"),
            "dp_size": ((1,), "no --dp-size"),
            "kv_events_config": (
                (heard := json.dumps(launch.events(str(self._plane.socket))),),
                f"--kv-events-config '{heard}'",
            ),
        }
        if self.role == "prefill":
            attempts = f"--optimistic-prefill-attempts {launch.ATTEMPTS}"
            return needs | {"optimistic_prefill_attempts": ((launch.ATTEMPTS,), attempts)}
        flag = "--disaggregation-decode-enable-radix-cache"
        return needs | {"disaggregation_decode_enable_radix_cache": ((True,), flag)}

    @staticmethod
    async def _abort(http: HttpClient, id: str) -> None:
        """A closed connection alone is noticed two seconds later."""
        try:
            async with asyncio.timeout(ABORT_TIME):
                await http.post_json(requests.ABORT, {"rid": id})
        except (PddError, TimeoutError) as error:
            log.warning("request %s could not be aborted: %s", id, error)
