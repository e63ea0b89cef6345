"""An engine around a model in this process: requests in, events out, one loop between them that plans, computes and
accounts."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import structs
from pydantic import BaseModel

from pdd_runtime.errors import Cancelled, EngineError, PddError, RequestError
from pdd_runtime.inprocess.block_table import BlockTable
from pdd_runtime.inprocess.config import InProcessConfig
from pdd_runtime.inprocess.passes import Passes
from pdd_runtime.inprocess.runner import Runner
from pdd_runtime.inprocess.sampler import Sampler
from pdd_runtime.inprocess.scheduler import Scheduler
from pdd_runtime.inprocess.sequence import Event, Sequence
from pdd_runtime.kv import BlockStore, seed
from pdd_runtime.plugins.acceptance import check_request
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

if TYPE_CHECKING:
    # llguidance need not be installed.
    from pdd_runtime.inprocess.guides import Guides

log = logging.getLogger(__name__)


class InProcessEngine(Engine):
    """All accounting happens on the event loop; the model computes in one thread of its own, and there the tokens are
    chosen. A subclass says how its `Runner` is made."""

    Config: ClassVar[type[BaseModel]] = InProcessConfig
    config: InProcessConfig
    runner: Runner
    """From its start on, as `passes`."""
    passes: Passes

    def __init__(self, config: BaseModel, model: ModelSpec) -> None:
        super().__init__(config, model)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"pdd-{self.name}")
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix=f"pdd-{self.name}-guides")
        self._exits = ExitStack()
        self._sequences: set[Sequence] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.Task[None] | None = None
        self._info: EngineInfo | None = None
        self._closed = False
        self._refusal: EngineError | None = EngineError("the engine has not started")

    @classmethod
    def promises(cls, model: ModelSpec, config: BaseModel) -> Capabilities:
        return Capabilities(
            logprobs=True,
            seeded=True,
            position_keyed_sampling=True,
            penalties=True,
            logit_bias=True,
            min_tokens=True,
            guided=importlib.util.find_spec("llguidance") is not None,
        )

    @abstractmethod
    def _load(self) -> Runner:
        """Load the model; in the thread where it will compute. Libraries that take long to import are imported here.
        Raises `EngineError`."""

    async def start(self, host: EngineHost) -> EngineInfo:
        if self._info is not None:
            return self._info
        loop, config = asyncio.get_running_loop(), self.config
        self._host = host
        runner = self.runner = await loop.run_in_executor(self._thread, self._begin)
        self._check_open()
        layout = runner.layout
        if layout.state_bytes:
            raise EngineError("blocks with state cannot be shared as this engine does it", where=self.name)
        blocks = config.kv_blocks or max(1, config.kv_memory // layout.block_bytes)
        self._store: BlockStore = host.open_store(layout, blocks)
        _, self._guides = await asyncio.gather(
            loop.run_in_executor(self._thread, runner.open, self._store.buffer()),
            loop.run_in_executor(self._compiler, self._open_guides),
        )
        self._check_open()
        self._scheduler = Scheduler(self._store, config.batch_limit, config.token_budget)
        self.passes = Passes(
            runner, self._scheduler, self._thread, step_timeout=config.step_timeout, kv_wait=config.kv_wait
        )
        self._info = EngineInfo(
            model=runner.name,
            fingerprint=runner.fingerprint,
            layout=layout,
            capacity_blocks=blocks,
            context_length=runner.context,
            batch_limit=config.batch_limit,
            capabilities=structs.replace(self.promises(self.model, self.config), guided=self._guides is not None),
        )
        self._refusal = None
        self._loop = asyncio.create_task(self._run(), name=f"pdd-{self.name}")
        return self._info

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        sequence = self._sequence(request, len(request.tokens), len(request.tokens) + 1, announces=True)
        async with self._serving(sequence):
            while not isinstance(event := await sequence.next(), Stopped):
                if not isinstance(event, Extended):
                    yield event

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        end = min(len(request.tokens) + request.max_tokens, self.runner.context)
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
        self.passes.wake()

    async def cancel(self, request_id: str) -> None:
        self._end(self._named(request_id), Cancelled("the request was cancelled", where=f"request {request_id}"))

    async def cached(self, tokens: Seq[int], salt: str = "") -> int:
        return self._store.cached(self._root(salt), tokens)

    async def load(self) -> Load:
        stats = self._store.stats
        return Load(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            batch_limit=self.config.batch_limit,
            blocks_used=stats.used,
            blocks_cached=stats.cached,
            blocks_total=stats.total,
            sessions=len(self._sequences),
            silent=int(self.passes.seconds),
        )

    async def tokenizer(self) -> TokenizerFiles:
        return self.runner.tokenizer

    async def drain(self) -> None:
        self._refusal = self._refusal or EngineError("the engine is draining", fix="use another worker")
        await self._idle.wait()

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._refusal = EngineError("the engine is closed")
            self._end(self._sequences, self._refusal)
            self._thread.submit(self._unload)  # behind a pass that still runs
        if self._loop is not None:
            self.passes.stop()
            await self._loop
        await asyncio.to_thread(self._thread.shutdown)
        await asyncio.to_thread(self._compiler.shutdown)

    def _begin(self) -> Runner:
        runner = self._load()
        self._exits.callback(runner.close)
        return runner

    def _unload(self) -> None:
        try:
            self._exits.close()
        except Exception:
            log.exception("the model did not close")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed")

    def _open_guides(self) -> Guides | None:
        try:
            from pdd_runtime.inprocess.guides import Guides

            return Guides(self.runner.tokenizer, self.runner.vocab)
        except ImportError as error:
            log.warning("no guided output: %s; pip install 'pdd-runtime[inprocess]'", error)
        except EngineError as error:
            log.warning("no guided output: %s", " ".join(str(error).split()))
        return None

    async def _run(self) -> None:
        try:
            await self.passes.run()
        except Exception as error:
            if isinstance(error, EngineError):
                self._refusal = error
            else:
                log.exception("the engine's loop crashed")
                self._refusal = EngineError("the engine's loop crashed", why=f"{type(error).__name__}: {error}")
            self._end(self._sequences, self._refusal)
            for sequence in self._sequences:
                # A pass that hangs may write into its blocks yet: they go to nobody else, and nobody waits for them.
                sequence.freed.set()
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
        tokens = request.tokens
        # The last token is chosen, but its KV is not computed.
        needed = -(-max(len(tokens), end - 1) // self._store.layout.block_size)
        check_request(
            request, vocab=self.runner.vocab, context=self.runner.context, needed=needed, blocks=self._store.blocks
        )
        if request.sampling.guide is not None and self._guides is None:
            raise RequestError("the engine cannot do this: guided")
        table = BlockTable(self._store, self._root(request.salt))
        sampler = Sampler(request.sampling, tokens, prompt_tokens)
        return Sequence(request.id, tokens, end, sampler, table, announces=announces, hold=hold)

    @asynccontextmanager
    async def _serving(self, sequence: Sequence) -> AsyncGenerator[None, None]:
        """The sequence is in the engine's hands; at the end, whatever ends it, all it held is free."""
        self._sequences.add(sequence)
        self._idle.clear()
        try:
            if sequence.sampler.sampling.guide is not None and self._guides is not None:
                # Whether it can be followed is known before anything is computed.
                await self._prepared(sequence, self._guides)
            if not sequence.over:
                self._scheduler.add(sequence)
                self.passes.wake()
            yield
        finally:
            self._scheduler.remove(sequence)
            self.passes.wake()
            try:
                await sequence.freed.wait()  # a pass may still be writing into its blocks
            finally:
                self._sequences.discard(sequence)
                if not self._sequences:
                    self._idle.set()

    async def _prepared(self, sequence: Sequence, guides: Guides) -> None:
        """Return when its guide is compiled, or when it has been given up."""
        prepare = partial(sequence.sampler.prepare, guides, samples=sequence.samples)
        loop = asyncio.get_running_loop()
        compiling = loop.run_in_executor(self._compiler, prepare)
        given_up = asyncio.ensure_future(sequence.freed.wait())
        first: set[asyncio.Future[Any]] = {compiling, given_up}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if compiling.done():
                compiling.result()
        finally:
            given_up.cancel()
            compiling.cancel()

    def _end(self, sequences: Iterable[Sequence], error: PddError) -> None:
        for sequence in tuple(sequences):
            sequence.fail(error)
            self._scheduler.remove(sequence)
            self.passes.wake()

    def _named(self, request_id: str) -> list[Sequence]:
        return [sequence for sequence in self._sequences if sequence.id == request_id]

    def _root(self, salt: str) -> bytes:
        return seed(self.runner.fingerprint, self._store.layout.spec, salt=salt)
