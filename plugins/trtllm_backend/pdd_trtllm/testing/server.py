"""The HTTP API of trtllm-serve, as far as it is used here."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse

from pdd_runtime.models.directory import read_config
from pdd_runtime.plugins.engine import Sampling
from pdd_trtllm.testing import disaggregation
from pdd_trtllm.testing.arguments import LlmArgs
from pdd_trtllm.testing.disaggregation import examine
from pdd_trtllm.testing.events import Events
from pdd_trtllm.testing.executor import Executor
from pdd_trtllm.testing.protocol import CompletionRequest, Refusal, check_biases
from pdd_trtllm.testing.task import Failed, Finish

DISCONNECT_POLL = 1.0
"""Seconds between two looks whether a client is still there: the only way to abort."""

STATS_PATIENCE = 2.0
"""Seconds that `/metrics` waits for something to say."""


class _Answer:
    """Tokens of one request on their way to its client."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[list[int], Finish | Failed | None]] = asyncio.Queue()
        self.over = False
        self.number = 0

    def put(self, tokens: list[int], finish: Finish | Failed | None) -> None:
        """In the executor's thread."""
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (tokens, finish))

    async def pieces(self) -> AsyncGenerator[tuple[list[int], Finish | Failed | None], None]:
        while not self.over:
            tokens, finish = await self._queue.get()
            self.over = finish is not None
            yield tokens, finish


class Api:
    def __init__(self, executor: Executor, args: LlmArgs, events: Events | None, version: str) -> None:
        directory = Path(args.model)
        config = read_config(directory)
        self._executor, self._args, self._events, self._version = executor, args, events, version
        self._model = directory.name
        self._context = args.max_seq_len or int(config["max_position_embeddings"])
        """Tokens of the longest sequence."""
        self._vocab = int(config["vocab_size"])
        self._most = None if args.enable_chunked_prefill else args.max_num_tokens
        """Tokens of the longest prompt in one pass."""
        self._watchers: set[asyncio.Task[None]] = set()
        self.app = FastAPI()
        self.app.add_exception_handler(RequestValidationError, self._invalid)
        self.app.add_api_route("/health", self.health, methods=["GET"])
        self.app.add_api_route("/version", self.version, methods=["GET"])
        self.app.add_api_route("/v1/models", self.models, methods=["GET"])
        self.app.add_api_route("/metrics", self.metrics, methods=["GET"])
        self.app.add_api_route("/server_info", self.server_info, methods=["GET"])
        self.app.add_api_route("/kv_cache_events", self.kv_cache_events, methods=["POST"])
        self.app.add_api_route("/v1/completions", self.completions, methods=["POST"], response_model=None)

    async def health(self) -> Response:
        return Response(status_code=200 if self._executor.error is None else 503)

    async def version(self) -> JSONResponse:
        return JSONResponse({"version": self._version})

    async def models(self) -> JSONResponse:
        card = {"id": self._model, "object": "model", "created": int(time.time()), "owned_by": "tensorrt_llm"}
        return JSONResponse({"object": "list", "data": [card]})

    async def metrics(self) -> JSONResponse:
        """Statistics of the passes since the last look, as JSON; where there were none, it waits for some."""
        stats, patience, kept = self._executor.stats, STATS_PATIENCE, self._args.enable_iter_perf_stats
        while kept and not stats and patience > 0:
            await asyncio.sleep(0.05)
            patience -= 0.05
        taken = [stats.popleft() for _ in range(len(stats))] if kept else []
        return JSONResponse(taken)

    async def server_info(self) -> JSONResponse:
        return JSONResponse({"disaggregated_params": {}})

    async def kv_cache_events(self) -> JSONResponse:
        return JSONResponse([] if self._events is None else self._events.take())

    async def completions(self, request: CompletionRequest, raw: Request) -> Response:
        try:
            prompt, most, sampling = self._examine(request)
            asked = examine(request.disaggregated_params, prompt, self._args, stream=bool(request.stream))
        except Refusal as refusal:
            return self._error(str(refusal))
        if asked == "context_only":
            # Its reader goes on, where there is more to be made than the first token.
            asked = None if request.max_tokens == 1 else asked
            most = 1
        answer = _Answer()
        include_stop = request.include_stop_str_in_output
        answer.number = self._executor.submit(prompt, most, sampling, include_stop, answer.put, asked)
        watcher = asyncio.create_task(self._await_disconnected(raw, answer))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        if request.stream:
            return StreamingResponse(self._stream(request, answer, len(prompt)), media_type="text/event-stream")
        ids: list[int] = []
        finish: Finish | Failed | None = None
        async for tokens, why in answer.pieces():
            ids += tokens
            finish = why
        if finish == "cancelled" or isinstance(finish, Failed):
            return self._error("the request was cancelled" if finish == "cancelled" else finish)
        told = self._chunk(request, ids, finish) | {"usage": self._usage(answer.number, len(prompt), len(ids))}
        told["choices"][0]["disaggregated_params"] = None
        if asked == "context_only" and finish == "length":
            told["choices"][0]["disaggregated_params"] = self._kept(answer.number, ids[0], prompt)
        if request.disaggregated_params is not None and request.disaggregated_params.request_type == "context_only":
            told["prompt_token_ids"] = prompt
        return JSONResponse(told)

    def _kept(self, request: int, first: int, prompt: list[int]) -> dict[str, Any]:
        transceiver = self._executor.transceiver
        assert transceiver is not None
        params = disaggregation.answer(request, first, prompt, transceiver.place, transceiver.geometry)
        return params.model_dump()

    async def _stream(self, request: CompletionRequest, answer: _Answer, prompt: int) -> AsyncGenerator[str, None]:
        made, options = 0, request.stream_options
        usage = options is not None and options.include_usage
        async for tokens, finish in answer.pieces():
            if isinstance(finish, Failed):
                yield f"data: {json.dumps({'error': self._complaint(finish)})}\n\n"
                return
            made += len(tokens)
            chunk = self._chunk(request, tokens, finish)
            if usage and options is not None and options.continuous_usage_stats:
                chunk["usage"] = self._usage(answer.number, prompt, made)
            yield f"data: {json.dumps(chunk)}\n\n"
        if usage:
            told = {"choices": [], "usage": self._usage(answer.number, prompt, made)}
            yield f"data: {json.dumps(self._chunk(request, [], None) | told)}\n\n"
        yield "data: [DONE]\n\n"

    async def _await_disconnected(self, raw: Request, answer: _Answer) -> None:
        while not answer.over and not await raw.is_disconnected():  # noqa: ASYNC110 - as the real one
            await asyncio.sleep(DISCONNECT_POLL)
        if not answer.over:
            self._executor.cancel(answer.number)
        self._executor.reused.pop(answer.number, None)

    def _examine(self, request: CompletionRequest) -> tuple[list[int], int, Sampling]:
        """Prompt, tokens to make, and how. Raises `Refusal`."""
        prompt = request.prompt
        if not isinstance(prompt, list) or not prompt or not all(isinstance(token, int) for token in prompt):
            raise Refusal("this stand-in reads one prompt of token ids")
        ids = [token for token in prompt if isinstance(token, int)]
        if request.n != 1 or request.use_beam_search or request.logprobs or request.response_format is not None:
            raise Refusal("n, beams, logprobs and response_format are not of this stand-in")
        if not all(0 <= token < self._vocab for token in ids):
            raise Refusal("Token ID out of range")
        if self._most is not None and len(ids) > self._most:
            raise Refusal(
                f"The sum of prompt length ({len(ids)}), query length (0) should not exceed max_num_tokens "
                f"({self._most})"
            )
        room = self._context - len(ids)
        if room < 1:
            raise Refusal(f"`default_max_tokens` ({room}) must be greater than 0: max_seq_len is {self._context}")
        if request.max_tokens is not None and request.max_tokens < 1:
            raise Refusal(f"max_tokens must be at least 1, not {request.max_tokens}")
        return ids, min(request.max_tokens or room, room), self._sampling(request)

    def _sampling(self, request: CompletionRequest) -> Sampling:
        if not request.ignore_eos:
            raise Refusal("this stand-in knows no end of a text: set ignore_eos")
        greedy = request.temperature == 0 or request.top_k == 1 or request.top_p == 0
        return Sampling(
            temperature=0.0 if greedy else 1.0 if request.temperature is None else request.temperature,
            top_k=request.top_k,
            top_p=1.0 if request.top_p is None else request.top_p,
            min_p=request.min_p,
            seed=request.seed or 0,
            stop_token_ids=tuple(request.stop_token_ids or ()),
            logit_bias=check_biases(request.logit_bias, self._vocab),
        )

    def _chunk(self, request: CompletionRequest, tokens: list[int], finish: Finish | Failed | None) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": "?" * len(tokens) if request.detokenize else "",
            "token_ids": None if request.detokenize else tokens,
            "logprobs": None,
            "finish_reason": finish,
            "stop_reason": None,
        }
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model,
            "choices": [choice],
            "usage": None,
        }

    def _usage(self, request: int, prompt: int, made: int) -> dict[str, Any]:
        counts = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
        return counts | {"prompt_tokens_details": {"cached_tokens": self._executor.reused.get(request, 0)}}

    def _error(self, message: str) -> Response:
        return JSONResponse(self._complaint(message), status_code=400)

    @staticmethod
    def _complaint(message: str) -> dict[str, Any]:
        return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}

    @staticmethod
    async def _invalid(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, status_code=400)
