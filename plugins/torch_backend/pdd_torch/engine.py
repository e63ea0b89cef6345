"""The engine: requests in, events out, one loop between them that plans, computes and accounts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from msgspec import structs
from pydantic import BaseModel

from pdd_runtime.errors import Cancelled, CapacityError, EngineError, PddError, RequestError
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
    PrefillEvent,
    PrefillRequest,
    Stopped,
    TokenizerFiles,
)
from pdd_torch.block_table import BlockTable
from pdd_torch.config import TorchConfig
from pdd_torch.scheduler import Scheduler
from pdd_torch.sequence import Event, Sequence

if TYPE_CHECKING:
    # Importing torch takes seconds, and a process that only lists plugins needs none of it.
    from pdd_torch.guides import Guides
    from pdd_torch.runner import Runner

log = logging.getLogger(__name__)

_RETRY = 0.05
"""Seconds after which a sequence that waits for blocks looks again: others may release some without telling us."""


class TorchEngine(Engine):
    """All accounting happens on the event loop; the forward passes run in one thread of their own."""

    name: ClassVar[str] = "torch"
    Config: ClassVar[type[BaseModel]] = TorchConfig

    def __init__(self, config: BaseModel, model: ModelSpec) -> None:
        super().__init__(config, model)
        assert isinstance(config, TorchConfig)
        self._config = config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pdd-torch")
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="pdd-torch-guides")
        self._sequences: set[Sequence] = set()
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.Task[None] | None = None
        self._info: EngineInfo | None = None
        self._closed = False
        self._refusal: EngineError | None = EngineError("the engine has not started")

    @classmethod
    def promises(cls, model: ModelSpec) -> Capabilities:
        return Capabilities(
            logprobs=True,
            seeded=True,
            position_keyed_sampling=True,
            exact=model.mode == "exact",
            penalties=True,
            logit_bias=True,
            min_tokens=True,
            guided=True,
        )

    async def start(self, host: EngineHost) -> EngineInfo:
        if self._info is not None:
            return self._info
        loop, config = asyncio.get_running_loop(), self._config
        self._host = host
        self._runner: Runner = await loop.run_in_executor(self._thread, self._load)
        layout = self._runner.layout
        blocks = config.kv_blocks or max(1, config.kv_memory // layout.block_bytes)
        if self._closed:
            raise EngineError("the engine is closed")
        self._store: BlockStore = host.open_store(layout, blocks)
        _, self._guides = await asyncio.gather(
            loop.run_in_executor(self._thread, self._runner.open, self._store.buffer()),
            loop.run_in_executor(self._compiler, self._open_guides),
        )
        self._scheduler = Scheduler(self._store, config.batch_limit, config.token_budget)
        self._info = EngineInfo(
            model=self._runner.name,
            fingerprint=self._runner.fingerprint,
            layout=layout,
            capacity_blocks=blocks,
            context_length=self._runner.context,
            batch_limit=config.batch_limit,
            capabilities=structs.replace(self.promises(self.model), guided=self._guides is not None),
        )
        self._refusal = None
        self._loop = asyncio.create_task(self._run(), name="pdd-torch")
        return self._info

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        sequence = self._sequence(request, len(request.tokens), len(request.tokens) + 1, announces=True)
        async with self._serving(sequence):
            while not isinstance(event := await sequence.next(), Stopped):
                if not isinstance(event, Extended):
                    yield event

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        end = min(len(request.tokens) + request.max_tokens, self._context)
        sequence = self._sequence(request, request.prompt_tokens, end, hold=request.hold)
        async with self._serving(sequence):
            event: Event | None = None
            while not isinstance(event, Stopped) or request.hold:
                # After the stop of a held request this waits until the stream is closed, and raises what ends it.
                event = await sequence.next()
                if not isinstance(event, BlocksReady):
                    yield event

    async def seal(self, request_id: str, tokens: int) -> None:
        for sequence in self._named(request_id):
            if not sequence.announces:  # a prefill makes its one token in any case
                self._scheduler.seal(sequence, tokens)
        self._work.set()

    async def cancel(self, request_id: str) -> None:
        self._end(self._named(request_id), Cancelled("the request was cancelled", where=f"request {request_id}"))

    async def cached(self, tokens: Seq[int], salt: str = "") -> int:
        return self._store.cached(self._root(salt), tokens)

    async def load(self) -> Load:
        stats = self._store.stats
        return Load(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            batch_limit=self._config.batch_limit,
            blocks_used=stats.used,
            blocks_cached=stats.cached,
            blocks_total=stats.total,
            sessions=len(self._sequences),
        )

    async def tokenizer(self) -> TokenizerFiles:
        return self._runner.tokenizer

    async def drain(self) -> None:
        self._refusal = self._refusal or EngineError("the engine is draining", fix="use another worker")
        await self._idle.wait()

    async def close(self) -> None:
        self._closed = True
        self._refusal = EngineError("the engine is closed")
        self._end(self._sequences, self._refusal)
        if self._loop is not None:
            await self._loop
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._compiler.shutdown)

    def _load(self) -> Runner:
        from pdd_torch.runner import Runner

        return Runner(self._config, self.model)

    def _open_guides(self) -> Guides | None:
        try:
            return self._runner.guides()
        except EngineError as error:
            log.warning("no guided output: %s", " ".join(str(error).split()))
            return None

    async def _run(self) -> None:
        """Plan a pass, have it computed, account for it; wait where there is nothing to compute."""
        loop = asyncio.get_running_loop()
        try:
            while not self._closed:
                planned = self._scheduler.plan()
                if planned:
                    chunks = [chunk for _, chunk in planned]
                    try:
                        tokens = await loop.run_in_executor(self._thread, self._runner.step, chunks)
                    except Exception as error:
                        log.exception("a forward pass failed")
                        self._scheduler.fail(planned, _failure("the forward pass failed", error))
                    else:
                        self._scheduler.finish(planned, tokens)
                else:
                    self._work.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_RETRY if self._scheduler.waiting else None):
                            await self._work.wait()
        except Exception as error:
            log.exception("the engine's loop crashed")
            self._refusal = _failure("the engine's loop crashed", error)
            self._end(self._sequences, self._refusal)
            self._host.failed(self._refusal)

    def _sequence(
        self,
        request: PrefillRequest | DecodeRequest,
        prompt_tokens: int,
        end: int,
        *,
        announces: bool = False,
        hold: bool = False,
    ) -> Sequence:
        """Raises `EngineError` when none are taken, `RequestError` and `CapacityError` when this one never can be."""
        if self._refusal is not None:
            raise self._refusal
        where, tokens, layout = f"request {request.id}", request.tokens, self._store.layout
        if not tokens or not 0 <= min(tokens) <= max(tokens) < self._runner.vocab:
            raise RequestError(f"tokens must be ids below {self._runner.vocab}, at least one", where=where)
        if len(tokens) > self._context:
            raise CapacityError(
                f"{len(tokens)} tokens are more than the context of {self._context}",
                where=where,
                fix="send fewer tokens",
            )
        if request.sampling.guide is not None and self._guides is None:
            raise RequestError("the engine cannot do this: guided")
        if not all(0 <= token < self._runner.vocab for token, _ in request.sampling.logit_bias):
            raise RequestError(f"token ids must be below {self._runner.vocab}", where="logit_bias")
        # The last token is chosen, but its KV is not computed.
        needed = -(-max(len(tokens), end - 1) // layout.block_size)
        if needed > self._store.blocks:
            raise CapacityError(
                f"the request needs {needed} blocks of KV, the pool has {self._store.blocks}",
                where=where,
                fix="ask for fewer tokens, or raise the engine's kv_memory",
            )
        table = BlockTable(self._store, self._root(request.salt))
        sampler = self._runner.sampler(request.sampling, tokens, prompt_tokens)
        return Sequence(request.id, tokens, end, sampler, table, announces=announces, hold=hold)

    @asynccontextmanager
    async def _serving(self, sequence: Sequence) -> AsyncGenerator[None, None]:
        """The sequence is in the engine's hands; at the end, whatever ends it, all it held is free."""
        self._sequences.add(sequence)
        self._idle.clear()
        try:
            if sequence.sampler.sampling.guide is not None and self._guides is not None:
                # Whether it can be followed is known before anything is computed.
                prepare = partial(sequence.sampler.prepare, self._guides, samples=sequence.samples)
                await asyncio.get_running_loop().run_in_executor(self._compiler, prepare)
            if not sequence.over:
                self._scheduler.add(sequence)
                self._work.set()
            yield
        finally:
            self._scheduler.remove(sequence)
            self._work.set()
            try:
                await sequence.freed.wait()  # a pass may still be writing into its blocks
            finally:
                self._sequences.discard(sequence)
                if not self._sequences:
                    self._idle.set()

    def _end(self, sequences: Iterable[Sequence], error: PddError) -> None:
        for sequence in tuple(sequences):
            sequence.fail(error)
            self._scheduler.remove(sequence)
        self._work.set()

    def _named(self, request_id: str) -> list[Sequence]:
        return [sequence for sequence in self._sequences if sequence.id == request_id]

    @property
    def _context(self) -> int:
        return self._runner.context

    def _root(self, salt: str) -> bytes:
        return seed(self._runner.fingerprint, self._store.layout.spec, salt=salt)


def _failure(what: str, error: Exception) -> EngineError:
    return EngineError(what, why=f"{type(error).__name__}: {error}")
