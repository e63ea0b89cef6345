"""SGLang behind the engine contract: a stock server, driven in token IDs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel

from pdd_runtime.errors import EngineError, PddError
from pdd_runtime.models.tokenizer import from_directory
from pdd_runtime.plugins.engine import Capabilities, ModelSpec, Sampling
from pdd_runtime.server.engine import Readings, ServerEngine
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.launch import Launch
from pdd_runtime.server.metrics import Metrics
from pdd_runtime.server.request import Found, Piece
from pdd_runtime.server.version import check_tried
from pdd_sglang import launch, requests
from pdd_sglang.config import SglangConfig

log = logging.getLogger(__name__)

TRIED = ("0.5.23",)
"""The versions whose linker interface was tried: it moves from one to the next."""
ABORT_TIME = 5.0
"""Seconds for SGLang to take note of an abort."""
_NEEDS = {
    "enable_unified_cache_external_linker": (True, "--enable-unified-cache-external-linker"),
    "incremental_streaming_output": (True, "--incremental-streaming-output"),
    "page_size": (1, "--page-size 1"),
    "disaggregation_mode": ("null", "no --disaggregation-mode"),
    "skip_tokenizer_init": (True, "--skip-tokenizer-init"),
}
"""Settings of a server that was started by others, what they must be, and how that is said."""


class SglangEngine(ServerEngine):
    name = "sglang"
    Config: ClassVar[type[BaseModel]] = SglangConfig
    config: SglangConfig
    health = "/ready"

    @classmethod
    def promises(cls, model: ModelSpec, config: BaseModel) -> Capabilities:
        # Penalties and grammars would have to count the output that was made elsewhere, and SGLang takes that for
        # prompt; min_tokens needs the tokenizer that we do without.
        return Capabilities(logprobs=True, logit_bias=True)

    def launch(self, model: Path, port: int, socket: str) -> Launch:
        return launch.server(self.config, self.model, model, port, socket)

    async def inspect(self, http: HttpClient) -> Capabilities:
        answer = await http.get_json("/server_info")
        info: dict[str, Any] = answer if isinstance(answer, dict) else {}
        version = str(info.get("version") or "")
        check_tried("SGLang", version, TRIED, http.url)
        for name, (value, flag) in _NEEDS.items():
            if info.get(name) != value:
                raise EngineError(
                    "the SGLang server was started otherwise than the worker needs it",
                    where=http.url,
                    why=f"{name} is {info.get(name)}, not {value}",
                    fix=f"start it with {flag}; `pdd-runtime render engine` prints the whole command line",
                )
        return self.promises(self.model, self.config)

    async def generate(
        self, http: HttpClient, id: str, tokens: Sequence[int], max_tokens: int, sampling: Sampling, salt: str
    ) -> AsyncGenerator[Piece, None]:
        position, begun, ended = len(tokens), False, False
        body = requests.body(id, tokens, max_tokens, sampling, salt, self._ends)
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
                await self._abort(http, id)

    def readings(self, metrics: Metrics) -> Readings:
        return Readings(int(metrics.value("sglang:num_running_reqs")), int(metrics.value("sglang:num_queue_reqs")))

    @cached_property
    def _ends(self) -> frozenset[int]:
        """Tokens that SGLang takes for the model's ends."""
        return frozenset(from_directory(self._path).eos_token_ids)

    @staticmethod
    async def _abort(http: HttpClient, id: str) -> None:
        """A closed connection alone is noticed two seconds later."""
        try:
            async with asyncio.timeout(ABORT_TIME):
                await http.post_json(requests.ABORT, {"rid": id})
        except (PddError, TimeoutError) as error:
            log.warning("request %s could not be aborted: %s", id, error)
