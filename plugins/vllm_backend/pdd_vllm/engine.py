"""vLLM behind the engine contract: a stock server, driven in token IDs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import ClassVar

from msgspec import structs
from pydantic import BaseModel

from pdd_runtime.plugins.engine import Capabilities, ModelSpec, Sampling
from pdd_runtime.server.engine import Readings, ServerEngine
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.launch import Launch
from pdd_runtime.server.metrics import Metrics, scrape
from pdd_runtime.server.plane import DataPlane
from pdd_runtime.server.request import Found, Piece
from pdd_runtime.server.version import check_tried
from pdd_vllm import completions, launch
from pdd_vllm.config import VllmConfig
from pdd_vllm.nixl import LATE, NixlPlane

TRIED = ("0.32.",)
"""Beginnings of the versions whose interfaces were tried: the connector's move from one to the next."""

_LOAD = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_BLOCKS, _USED = "vllm:cache_config_info", "vllm:kv_cache_usage_perc"
_READ = (*_LOAD, _BLOCKS, _USED, LATE)


class VllmEngine(ServerEngine):
    name = "vllm"
    Config: ClassVar[type[BaseModel]] = VllmConfig
    config: VllmConfig
    scheduler = True

    @classmethod
    def promises(cls, model: ModelSpec, config: BaseModel) -> Capabilities:
        assert isinstance(config, VllmConfig)
        # Penalties and grammars would have to count the output that was made elsewhere, and vLLM takes that for prompt.
        able = Capabilities(logprobs=True, logit_bias=True, min_tokens=True)
        # To vLLM, KV is kept for one reader, and free with its word.
        return structs.replace(able, kv="native", fan_out=False) if config.data_plane == "nixl" else able

    def plane(self) -> DataPlane:
        return NixlPlane(self.name, self.config) if self.config.data_plane == "nixl" else super().plane()

    def launch(self, model: Path, port: int, socket: str) -> Launch:
        side = self._plane.port if isinstance(self._plane, NixlPlane) else 0
        return launch.server(self.config, self.model, model, port, socket, side)

    async def inspect(self, http: HttpClient) -> Capabilities:
        answer = await http.get_json("/version")
        version = str(answer.get("version", "")) if isinstance(answer, dict) else ""
        check_tried("vLLM", version, TRIED, http.url)
        return self.promises(self.model, self.config)

    async def generate(
        self, http: HttpClient, id: str, tokens: Sequence[int], max_tokens: int, sampling: Sampling, salt: str
    ) -> AsyncGenerator[Piece, None]:
        position = len(tokens)
        body = completions.request(tokens, max_tokens, sampling, salt, self._model.vocab)
        if self.config.data_plane == "nixl":
            body["stream_options"] = {"include_usage": True}
        else:
            body["kv_transfer_params"] = {"pdd": id}
        async with aclosing(http.stream(completions.PATH, body)) as events:
            async for event in events:
                for choice in event["choices"]:
                    piece = completions.tokens_of(choice, position, sampling.logprobs)
                    if piece:
                        position += len(piece)
                        yield piece
                if event.get("usage"):
                    yield Found(completions.cached_of(event["usage"]))

    async def look(self, http: HttpClient) -> Readings:
        text = await http.get_text(self.metrics)
        # Of its thousands of samples few are wanted, and to parse all would hold the event loop up.
        metrics = scrape("".join(line for line in text.splitlines(True) if line.startswith(_READ)))
        if isinstance(self._plane, NixlPlane):
            self._plane.watch(metrics)
        return self.readings(metrics)

    def readings(self, metrics: Metrics) -> Readings:
        running, waiting = (int(metrics.value(name)) for name in _LOAD)
        blocks = int(next((info["num_gpu_blocks"] for info in metrics.labels(_BLOCKS)), 0))
        return Readings(running, waiting, round(metrics.value(_USED) * blocks), blocks)
