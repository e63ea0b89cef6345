"""Requests and answers in the words of SGLang's `/generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from pdd_runtime.errors import EngineError, RequestError
from pdd_runtime.plugins.engine import Sampling, Token
from pdd_runtime.server.plane import Readings
from pdd_sglang.config import NOBODY
from pdd_sglang.rooms import Room

PATH = "/generate"
ABORT = "/abort_request"
LOADS = "/v1/loads"


def body(
    id: str, tokens: Sequence[int], max_tokens: int, sampling: Sampling, salt: str, eos: frozenset[int]
) -> dict[str, Any]:
    """`eos`: what SGLang takes for the model's ends by itself. Raises `RequestError`."""
    if sampling.logprobs is not None and sampling.logit_bias:
        raise RequestError("SGLang's logprobs are those with the bias: ask for one of the two", where="logit_bias")
    request: dict[str, Any] = {
        "rid": id,
        # The linker is told whose pages it sees by the session alone.
        "session_id": id,
        "input_ids": list(tokens),
        "stream": True,
        "sampling_params": _parameters(max_tokens, sampling, eos),
    }
    if sampling.logprobs is not None:
        request |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs}
    if salt:
        request["cache_salt"] = salt
    return request


def to_room(
    id: str, tokens: Sequence[int], max_tokens: int, sampling: Sampling, salt: str, eos: frozenset[int], room: Room
) -> dict[str, Any]:
    """One side of a transfer. A prefill server makes one token, whatever `max_tokens` is, and that is also the first
    of the other side. Raises as `body`."""
    request = body(id, tokens, max_tokens, sampling, salt, eos)
    del request["session_id"]
    return request | room.body


def to_nobody(id: str, tokens: Sequence[int], sampling: Sampling, salt: str, eos: frozenset[int]) -> dict[str, Any]:
    """A token of a server that exchanges its KV, without an exchange. Raises as `body`."""
    request = body(id, tokens, 1, sampling, salt, eos)
    del request["session_id"]
    return request | {"bootstrap_host": NOBODY, "bootstrap_room": 0}


def _parameters(max_tokens: int, sampling: Sampling, eos: frozenset[int]) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "max_new_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
    }
    stops = frozenset(sampling.stop_token_ids)
    if stops and eos <= stops:
        parameters["stop_token_ids"] = sorted(stops)
    else:
        # It would stop at the model's own ends as well, which were not asked for; so the worker stops it instead.
        parameters["ignore_eos"] = True
    if sampling.logit_bias:
        parameters["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    return parameters


class _Meta(msgspec.Struct):
    cached_tokens: int | None = None
    """Of a request that was given up before it was begun nothing is said."""
    finish_reason: dict[str, Any] | None = None
    output_token_logprobs: list[tuple[float, int, Any]] = []
    output_top_logprobs: list[list[tuple[float, int, Any]] | None] = []


class _Event(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


class Answer(msgspec.Struct, frozen=True):
    """One event of a stream."""

    tokens: tuple[Token, ...]
    cached: int
    """Tokens of the prompt that were not computed."""
    finished: bool


def answer(event: Any, position: int, logprobs: int | None) -> Answer:
    """The tokens of `event`, from `position` on. Raises `EngineError` where it is no such event, or says that SGLang
    has given the request up."""
    try:
        read = msgspec.convert(event, _Event)
    except msgspec.ValidationError as error:
        raise EngineError("SGLang answers with what is no piece of an answer", why=str(error)) from error
    meta = read.meta_info
    finish = meta.finish_reason or {}
    if finish.get("type") not in (None, "length", "stop"):
        raise EngineError("SGLang gave a request up", why=str(finish.get("message") or finish))
    if meta.cached_tokens is None:
        raise EngineError(
            "SGLang does not say what it had of a prompt", why=f"meta_info without cached_tokens: {event}"
        )
    if logprobs is not None and len(meta.output_token_logprobs) != len(read.output_ids):
        raise EngineError(
            "SGLang's logprobs are not those of the tokens beside them",
            why=f"{len(read.output_ids)} tokens, {len(meta.output_token_logprobs)} logprobs",
            fix="start the server with --incremental-streaming-output",
        )
    tokens = tuple(_token(meta, index, position + index, id, logprobs) for index, id in enumerate(read.output_ids))
    return Answer(tokens, meta.cached_tokens, bool(finish))


def _token(meta: _Meta, index: int, position: int, id: int, logprobs: int | None) -> Token:
    if logprobs is None:
        return Token(position, id)
    top = meta.output_top_logprobs[index] if logprobs else None
    return Token(
        position, id, meta.output_token_logprobs[index][0], tuple((other, value) for value, other, _ in top or ())
    )


class _Transfers(msgspec.Struct):
    prefill_inflight_queue_reqs: int = 0


class _Load(msgspec.Struct):
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    disaggregation: _Transfers | None = None


class _Loads(msgspec.Struct):
    loads: Annotated[list[_Load], msgspec.Meta(min_length=1)]


def load(told: Any, page: int) -> Readings:
    """What `LOADS` answers, in pages of `page` tokens. Raises `EngineError`."""
    try:
        one = msgspec.convert(told, _Loads).loads[0]
    except msgspec.ValidationError as error:
        raise EngineError("SGLang does not say how busy it is", where=LOADS, why=str(error)) from error
    held = one.disaggregation.prefill_inflight_queue_reqs if one.disaggregation else 0
    return Readings(
        one.num_running_reqs + held,
        one.num_waiting_reqs,
        -(-one.num_used_tokens // page),
        one.max_total_num_tokens // page,
    )
