"""The scripted engine: a whole engine without a model, for fast tests and for measuring everything around one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar, Literal

import msgspec
import xxhash
from pydantic import BaseModel

from pdd_runtime.errors import Cancelled, EngineError, PddError, RequestError
from pdd_runtime.kv import BlockStore, seed
from pdd_runtime.plugins.engine import (
    BlocksReady,
    Capabilities,
    DecodeEvent,
    DecodeRequest,
    Engine,
    EngineHost,
    EngineInfo,
    Extended,
    Load,
    ModelSpec,
    Offer,
    OfferRequest,
    PrefillEvent,
    PrefillRequest,
    Received,
    ReceiveRequest,
    Stopped,
    TokenizerFiles,
    Tokens,
)
from pdd_runtime.plugins.hookspecs import hookimpl
from pdd_runtime.testing import byte_tokenizer
from pdd_runtime.testing.scripted_acceptance import Asked, check
from pdd_runtime.testing.scripted_batch import ScriptedBatch
from pdd_runtime.testing.scripted_config import ScriptedConfig
from pdd_runtime.testing.scripted_native import NamedStore, ScriptedNative
from pdd_runtime.testing.scripted_request import ScriptedRequest
from pdd_runtime.testing.scripted_steps import ScriptedSteps
from pdd_runtime.testing.toy_choice import ToyChoice
from pdd_runtime.testing.toy_model import ToyModel
from pdd_runtime.testing.toy_sequence import ToySequence


class ScriptedEngine(Engine):
    """Tokens and KV are hashes of the tokens before (`ToyModel`). Cached KV is compared byte for byte before it is
    used, so that a wrong transfer fails the request that reads it."""

    name: ClassVar[str] = "scripted"
    Config: ClassVar[type[BaseModel]] = ScriptedConfig

    def __init__(self, config: BaseModel, model: ModelSpec) -> None:
        super().__init__(config, model)
        assert isinstance(config, ScriptedConfig)
        self._config = config
        self._requests: set[ScriptedRequest] = set()
        self._batch = ScriptedBatch(config.batch_limit)
        self._steps = ScriptedSteps(config.token_time)
        self._native: ScriptedNative | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._refusal: EngineError | None = EngineError("the engine has not started")
        self._made = 0
        switched = dict.fromkeys(config.lacks, False) | dict.fromkeys(config.claims, True)
        self._capabilities = msgspec.structs.replace(self.promises(model, config), **switched)

    @classmethod
    def promises(cls, model: ModelSpec, config: BaseModel) -> Capabilities:
        assert isinstance(config, ScriptedConfig)
        native = config.data_plane == "native"
        return Capabilities(
            kv="native" if native else "portable",
            extend=config.extend,
            fan_out=not native,
            logprobs=True,
            seeded=True,
            position_keyed_sampling=True,
            exact=True,
            penalties=True,
            logit_bias=True,
            min_tokens=True,
        )

    async def start(self, host: EngineHost) -> EngineInfo:
        config = self._config
        await asyncio.sleep(config.start_time)
        if config.start_error:
            raise EngineError(config.start_error)
        layout = config.layout
        source = f"scripted/{self.model.source}/{config.vocab_size}/{config.alphabet}/{config.eos_every}"
        vocabulary = range(32, 127) if config.alphabet == "ascii" else range(256)
        self._host = host
        self._toy = ToyModel(source, layout, vocabulary, byte_tokenizer.END, config.eos_every)
        self._fingerprint = xxhash.xxh3_128_hexdigest(source.encode())
        self._store = await self._open(host)
        self._refusal = None
        return EngineInfo(
            model=self.model.source,
            fingerprint=self._fingerprint,
            layout=layout,
            capacity_blocks=config.capacity_blocks,
            context_length=config.context_length,
            batch_limit=config.batch_limit,
            capabilities=self._capabilities,
        )

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        with self._request(request) as running:
            await self._batch.enter(running)
            sequence = self._sequence(running, request.tokens, request.salt)
            total = len(request.tokens)
            for to in self._chunks(sequence.cached, total):
                await self._compute(running, sequence, to)
                if to == total:
                    sequence.commit_tail()
                yield BlocksReady(to, sequence.cached)
                running.check()
            token = ToyChoice(self._toy, request.sampling, request.tokens, total).next(sequence.states[-1], total)
            self._count()
            yield Tokens((token,))

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        with self._request(request) as running:
            await self._batch.enter(running)
            sequence = self._sequence(running, request.tokens, request.salt)
            yield await self._extend(running, sequence, request)
            running.check()
            choice = ToyChoice(self._toy, request.sampling, request.tokens, request.prompt_tokens)
            last = len(request.tokens) + request.max_tokens
            with self._steps.taking(running):
                while not (reason := self._reason(running, request, last)):
                    state = sequence.compute(len(sequence.tokens))
                    await self._steps.next(running)
                    token = choice.next(state, len(sequence.tokens))
                    sequence.tokens.append(token.id)
                    self._count()
                    yield Tokens((token,))
                    running.check()
            sequence.commit_tail()
            self._batch.leave(running)
            if not request.hold:
                running.release()
            yield Stopped(reason, len(sequence.tokens))
            while request.hold:
                running.check()
                await running.wait()

    def offer(self, request: OfferRequest) -> AsyncGenerator[Offer, None]:
        return self._offer(self._native, request) if self._native else super().offer(request)

    def receive(self, request: ReceiveRequest) -> AsyncGenerator[Received, None]:
        return self._receive(self._native, request) if self._native else super().receive(request)

    async def seal(self, request_id: str, tokens: int) -> None:
        for request in self._named(request_id):
            request.seal_at = tokens

    async def cancel(self, request_id: str) -> None:
        self._stop(self._named(request_id), Cancelled("the request was cancelled", where=f"request {request_id}"))

    async def cached(self, tokens: Sequence[int], salt: str = "") -> int:
        self._accept()
        return self._store.cached(self._root(salt), tokens)

    async def load(self) -> Load:
        stats = self._store.stats
        return Load(
            running=self._batch.running,
            waiting=self._batch.waiting,
            batch_limit=self._config.batch_limit,
            blocks_used=stats.used,
            blocks_cached=stats.cached,
            blocks_total=stats.total,
            sessions=len(self._requests),
        )

    async def tokenizer(self) -> TokenizerFiles:
        return byte_tokenizer.byte_tokenizer()

    async def drain(self) -> None:
        self._refusal = self._refusal or EngineError("the engine is draining", fix="use another worker")
        await self._idle.wait()

    async def close(self) -> None:
        self._fail(EngineError("the engine is closed"))
        if self._native is not None:
            await self._native.desk.close()

    async def _open(self, host: EngineHost) -> BlockStore:
        config = self._config
        if config.data_plane == "pdd":
            return host.open_store(config.layout, config.capacity_blocks)
        store = NamedStore(host.open_names(config.layout), config.capacity_blocks)
        self._native = ScriptedNative(store, self._fingerprint, config.native_rate, config.lease)
        await self._native.desk.start()
        return store

    async def _offer(self, native: ScriptedNative, request: OfferRequest) -> AsyncGenerator[Offer, None]:
        with self._request(request) as running:
            await self._batch.enter(running)
            sequence = self._sequence(running, request.tokens, request.salt)
            for to in self._chunks(sequence.cached, len(request.tokens)):
                await self._compute(running, sequence, to)
            sequence.commit_tail()
            self._batch.leave(running)
            with native.desk.keep(sequence, native.lease, request.timeout) as kept:
                yield Offer(msgspec.to_builtins(kept.ticket))
                await running.during(kept.read)

    async def _receive(self, native: ScriptedNative, request: ReceiveRequest) -> AsyncGenerator[Received, None]:
        with self._request(request) as running:
            sequence = self._sequence(running, request.tokens, request.salt)
            received = await native.receive(running, sequence, request.offer, request.timeout)
            sequence.commit_tail()
            yield Received(len(request.tokens) - received, received)
            while True:
                running.check()
                await running.wait()

    def _fail(self, error: EngineError) -> None:
        self._refusal = error
        self._stop(self._requests, error)

    def _stop(self, requests: Iterable[ScriptedRequest], error: PddError) -> None:
        """What they hold is free now, and not only when their streams are read on."""
        for request in tuple(requests):
            request.stop(error)
            self._batch.leave(request)

    def _count(self) -> None:
        """One token more; crash where the config says so."""
        self._made += 1
        if self._made == self._config.crash_after:
            error = EngineError(f"the engine crashed after {self._made} tokens", why="its config says so: crash_after")
            self._fail(error)
            self._host.failed(error)
            raise error

    def _accept(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def _root(self, salt: str) -> bytes:
        return seed(self._fingerprint, self._store.layout.spec, salt=salt)

    def _sequence(self, running: ScriptedRequest, tokens: Sequence[int], salt: str) -> ToySequence:
        running.sequence = ToySequence(self._store, self._toy, self._root(salt), tokens, running.id)
        return running.sequence

    async def _compute(self, running: ScriptedRequest, sequence: ToySequence, to: int) -> None:
        """One pass: the KV of the first `to` tokens."""
        rate = self._config.prefill_rate
        await running.pause((to - len(sequence.states)) / rate if rate else 0.0)
        sequence.compute(to)

    async def _extend(self, running: ScriptedRequest, sequence: ToySequence, request: DecodeRequest) -> Extended:
        """Have the KV of all known tokens."""
        known = len(request.tokens)
        if (self._config.extend == "local") is not (request.offer is None):
            without = "cannot take an offer" if request.offer else "needs an offer of all known tokens"
            raise RequestError(
                f"a decode {without}", where=f"request {request.id}", why=f"extend: {self._config.extend}"
            )
        if request.offer is not None:
            assert self._native is not None
            received = await self._native.receive(running, sequence, request.offer, None)
            return Extended(known, 0, 0, received)
        # The last token's logits are needed to go on, so it is computed even where its KV is here.
        cached = min(sequence.cached, known - 1) if request.max_tokens else sequence.cached
        passes = 0
        if cached < known:
            for to in self._chunks(sequence.cached, known):
                await self._compute(running, sequence, to)
                passes += 1
        return Extended(cached, known - cached, passes)

    def _chunks(self, cached: int, total: int) -> Iterator[int]:
        """Where each pass over `total` known tokens ends; one where all is cached, for the last token's logits."""
        while cached + self._config.chunk < total:
            cached += self._config.chunk
            yield cached
        yield total

    def _reason(
        self, running: ScriptedRequest, request: DecodeRequest, last: int
    ) -> Literal["length", "stop", "sealed"] | None:
        assert running.sequence is not None
        tokens = running.sequence.tokens
        if len(tokens) > len(request.tokens) and tokens[-1] in request.sampling.stop_token_ids:
            return "stop"
        if running.seal_at is not None and len(tokens) >= running.seal_at:
            return "sealed"
        return "length" if len(tokens) >= min(last, self._config.context_length) else None

    def _named(self, request_id: str) -> list[ScriptedRequest]:
        return [request for request in self._requests if request.id == request_id]

    @contextmanager
    def _request(self, request: Asked) -> Iterator[ScriptedRequest]:
        """A request from its acceptance until its stream ends, in whatever way."""
        self._accept()
        check(request, self._config, self._capabilities)
        running = ScriptedRequest(request.id)
        self._requests.add(running)
        self._idle.clear()
        try:
            yield running
        finally:
            self._batch.leave(running)
            running.release()
            self._requests.discard(running)
            if not self._requests:
                self._idle.set()


@hookimpl
def pdd_register_engines() -> list[type[Engine]]:
    return [ScriptedEngine]
