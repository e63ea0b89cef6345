"""TensorRT-LLM's own transfer: one server keeps a prompt's KV for a reader, and another pulls it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from pdd_runtime.clock import now
from pdd_runtime.errors import EngineError, PddError
from pdd_runtime.plugins.engine import Offer, OfferRequest, Received, ReceiveRequest, Sampling
from pdd_runtime.server.cached_pages import CachedPages
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.native import NativePlane
from pdd_runtime.server.plane import Look, Readings
from pdd_trtllm.config import TrtllmConfig
from pdd_trtllm.events import CacheEvents
from pdd_trtllm.sampling import PATH, completion, context, generation

log = logging.getLogger(__name__)

EVENTS_EVERY = 0.2
"""Seconds between two looks at what is cached, where the last one has found nothing new."""
EVENTS_TIME = 60.0
"""Seconds for an answer: some releases collect events until none has come for two seconds."""
_UNFINISHED = ("length", "not_finished")
"""How a context ends that is kept for its reader."""
_TRIES = 5
"""Passes after which a server that says nothing of its cache will not do so."""
_PROBE = (1, 2)
_NEEDED = ("ctx_request_id", "first_gen_tokens", "encoded_opaque_state")


class TransceiverPlane(NativePlane):
    """TensorRT-LLM says to nobody when a reader has all of what is kept, and frees it then, or after its
    `kv_transfer_timeout_ms`. A read that is late or a second one is an error to it."""

    config: TrtllmConfig

    async def meet(self, http: HttpClient, look: Look, seconds: float) -> None:
        async def found() -> Readings:
            """What a pass says goes to whoever asks first, which may have been a worker before this one."""
            for _ in range(_TRIES):
                if (readings := await look()).blocks_total:
                    break
                await http.post_json(PATH, completion(_PROBE, 1, Sampling(temperature=0)) | {"stream": False})
            return readings

        await super().meet(http, found, seconds)

    async def offering(self, http: HttpClient, id: str, request: OfferRequest) -> AsyncGenerator[Offer, None]:
        where = f"request {request.id}, for {request.reader}"
        seconds = min(request.timeout, self.config.transfer_timeout)
        try:
            answer = await http.post_json(PATH, context(request.tokens), timeout=request.timeout)
        except PddError as error:
            raise EngineError(
                "TensorRT-LLM keeps no KV for a reader", where=where, why=str(error), fix=error.fix
            ) from error
        until = now() + seconds
        yield self._terms(answer, request, where)
        await asyncio.sleep(until - now())
        raise EngineError(
            "the reader has not said in its time that it has the KV",
            where=where,
            why=f"it had {seconds:g} s",
            fix="raise the pool's transfer_timeout where the link needs longer",
        )

    async def receiving(self, http: HttpClient, id: str, request: ReceiveRequest) -> AsyncGenerator[Received, None]:
        where = f"request {request.id}"
        terms = self._read(request, where)
        here = self.cached(self.root(request.salt), request.tokens)
        seconds = min(request.timeout, self.config.transfer_timeout)
        try:
            # It answers when all is there, and with an error otherwise; it never computes the prompt by itself.
            answer = await http.post_json(PATH, generation(request.tokens, terms.disaggregated), timeout=seconds)
        except PddError as error:
            raise EngineError(
                "TensorRT-LLM did not get the KV",
                where=where,
                why=str(error),
                fix="see both servers' logs; raise transfer_timeout where the link needs longer",
            ) from error
        choice = _choice(answer, where)
        if choice.get("finish_reason") != "length":
            raise EngineError(
                "TensorRT-LLM broke off a read", where=where, why=f"its finish_reason is {choice.get('finish_reason')}"
            )
        yield Received(here, len(request.tokens) - here)

    async def follow(self, http: HttpClient) -> None:
        events = CacheEvents(CachedPages(self.names, self.root), self.model.layout.block_size)
        answered = True
        while True:
            try:
                told = await http.post_json("/kv_cache_events", {}, timeout=EVENTS_TIME)
                answered = True
            except PddError as error:
                # What was on its way to us is lost: the next event's number will say so.
                if answered:
                    log.warning("what %s has cached was not to be learned: %s", self.name, error)
                told, answered = None, False
            if told:
                events.take(told)
            else:
                await asyncio.sleep(EVENTS_EVERY)

    def _terms(self, answer: Any, request: OfferRequest, where: str) -> Offer:
        """Raises `EngineError`."""
        params = _kept(answer, request, where)
        try:
            return Offer(msgspec.to_builtins(_Terms(params, self.digest(request), self.config.transceiver)))
        except (ValueError, TypeError) as error:
            raise EngineError("what a reader would need is too long", where=where, why=str(error)) from error

    def _read(self, request: ReceiveRequest, where: str) -> _Terms:
        """Raises `EngineError`."""
        try:
            terms = msgspec.convert(request.offer.params, _Terms)
        except msgspec.ValidationError as error:
            raise EngineError("this is no offer of a TensorRT-LLM server's", where=where, why=str(error)) from error
        if terms.of != self.digest(request):
            # TensorRT-LLM would take it for the KV of whatever prompt it is asked about.
            raise EngineError("the offer is of other tokens, or of another model", where=where)
        backends = {terms.transceiver, self.config.transceiver}
        if len(backends - {"DEFAULT"}) > 1:
            raise EngineError(
                f"KV is kept for {terms.transceiver}, and this server reads by {self.config.transceiver}",
                where=where,
                fix="give both pools the same transceiver",
            )
        return terms


class _Terms(msgspec.Struct, frozen=True):
    """What an offer says."""

    disaggregated: dict[str, Any]
    """TensorRT-LLM's own parameters, whole."""
    of: str
    """What the KV is of: the name of the last block, which stands for all before it."""
    transceiver: str
    """What moves it."""


def _kept(answer: Any, request: OfferRequest, where: str) -> dict[str, Any]:
    """The parameters by which a context can be read. Raises `EngineError`."""
    choice = _choice(answer, where)
    finish, params = choice.get("finish_reason"), choice.get("disaggregated_params")
    if finish not in _UNFINISHED:
        raise EngineError("TensorRT-LLM keeps no KV for a reader", where=where, why=f"its finish_reason is {finish}")
    prompt = answer.get("prompt_token_ids")
    if prompt is not None and tuple(prompt) != request.tokens:
        raise EngineError("TensorRT-LLM keeps the KV of another prompt", where=where, why=f"{len(prompt)} tokens")
    if not isinstance(params, dict) or any(params.get(name) in (None, "", []) for name in _NEEDED):
        raise EngineError(
            "TensorRT-LLM answers without saying where the KV is",
            where=where,
            why=f"disaggregated_params: {params!r:.200}",
        )
    # What is not set is left out: a reader of another release may not know its name.
    return {name: value for name, value in params.items() if value is not None}


def _choice(answer: Any, where: str) -> dict[str, Any]:
    try:
        choice = answer["choices"][0]
    except (KeyError, IndexError, TypeError) as error:
        raise EngineError("TensorRT-LLM answers with what is no completion", where=where, why=f"{error!r}") from error
    if not isinstance(choice, dict):
        raise EngineError("TensorRT-LLM answers with what is no completion", where=where, why=f"{choice!r:.200}")
    return choice
