"""The engine `trtllm`: a stock trtllm-serve, with our connector in it, or with its own disaggregated serving."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, ClassVar

from msgspec import structs
from pydantic import BaseModel

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import Capabilities, Load, ModelSpec, Sampling, Token
from pdd_runtime.server.engine import Readings, ServerEngine
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.launch import Launch
from pdd_runtime.server.plane import DataPlane
from pdd_runtime.server.request import Found, Piece
from pdd_runtime.server.shared import SharedPlane
from pdd_trtllm.config import TrtllmConfig
from pdd_trtllm.launch import launch
from pdd_trtllm.native import TransceiverPlane
from pdd_trtllm.sampling import PATH, completion

OLDEST, BEYOND = (1, 2), (2, 0)
"""The releases whose connector interface is known: from the first on, before the second."""


class TrtllmEngine(ServerEngine):
    name: ClassVar[str] = "trtllm"
    Config: ClassVar[type[BaseModel]] = TrtllmConfig
    config: TrtllmConfig
    scheduler: ClassVar[bool] = True

    @classmethod
    def promises(cls, model: ModelSpec, config: BaseModel) -> Capabilities:
        assert isinstance(config, TrtllmConfig)
        # Its other ways to choose tokens forget, or count anew, where an answer goes on in a second request; and its
        # logprobs name tokens by their text, which several may share.
        able = Capabilities(logit_bias=True)
        return structs.replace(able, kv="native", fan_out=False) if config.native else able

    def plane(self) -> DataPlane:
        if self.config.native:
            return TransceiverPlane(self.name, self.config)
        # Of an aborted request a connector is told nothing: its tail must be asked for before.
        return SharedPlane(self.name, self.config, scheduler=self.scheduler, tails=True)

    def launch(self, model: Path, port: int, socket: str) -> Launch:
        return launch(self.config, self.model, model, port, socket, self.role)

    async def inspect(self, http: HttpClient) -> Capabilities:
        answer = await http.get_json("/version")
        version = answer.get("version") if isinstance(answer, dict) else None
        found = re.match(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
        if found is None or not OLDEST <= tuple(map(int, found.groups())) < BEYOND:
            oldest, beyond = (".".join(map(str, numbers)) for numbers in (OLDEST, BEYOND))
            raise EngineError(
                f"TensorRT-LLM {version} cannot be driven",
                where=http.url,
                why=f"its KV cache connector is known from {oldest} on, and nothing is known of {beyond}",
                fix=f"pip install 'tensorrt-llm>={oldest},<{beyond}' in the server's environment",
            )
        return self.promises(self.model, self.config)

    async def generate(
        self, http: HttpClient, id: str, tokens: Sequence[int], max_tokens: int, sampling: Sampling, salt: str
    ) -> AsyncGenerator[Piece, None]:
        """TensorRT-LLM gives a request a number of its own: the connector knows ours by its tokens."""
        position = len(tokens)
        body = completion(tokens, max_tokens, sampling)
        if self.config.native:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        async with aclosing(http.stream(PATH, body)) as events:
            async for event in events:
                ids = _ids(event, id)
                if position == len(tokens) and (found := _cached(event)) is not None:
                    yield Found(found)
                if ids:
                    yield tuple(Token(position + index, token) for index, token in enumerate(ids))
                    position += len(ids)

    async def look(self, http: HttpClient) -> Readings:
        """Of the last pass since the last look; where there was none, nothing runs."""
        passes = await http.get_json("/metrics")
        last = passes[-1] if isinstance(passes, list) and passes else {}
        cache = last.get("kvCacheStats", {}) if isinstance(last, dict) else {}
        return Readings(
            *(_number(last, name) for name in ("numActiveRequests", "numQueuedRequests")),
            *(_number(cache, name) for name in ("usedNumBlocks", "maxNumBlocks")),
        )

    async def load(self) -> Load:
        """Between passes it says nothing: what the last one has used is free once no request is there."""
        load = await super().load()
        return load if load.sessions or not self.config.native else structs.replace(load, blocks_used=0)


def _ids(event: Any, id: str) -> list[int]:
    """New tokens in an event of a stream. Raises `EngineError`."""
    try:
        choices = event["choices"]
        if not choices:
            return []
        finish, ids = choices[0]["finish_reason"], choices[0]["token_ids"] or []
    except (KeyError, IndexError, TypeError) as error:
        raise EngineError("TensorRT-LLM answers with what is no completion", where=id, why=f"{error!r}") from error
    if finish not in (None, "length", "stop"):
        raise EngineError("TensorRT-LLM broke off a request", where=id, why=f"its finish_reason is {finish}")
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise EngineError("TensorRT-LLM answers without token ids", where=id, why=f"token_ids: {ids!r}")
    return ids


def _cached(event: dict[str, Any]) -> int | None:
    """Tokens of the prompt that it found, where it says so."""
    details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return cached if isinstance(cached, int) else None


def _number(stats: Any, name: str) -> int:
    value = stats.get(name, 0) if isinstance(stats, dict) else 0
    return value if isinstance(value, int) else 0
