"""An engine that is a server of its own: requests go to it over HTTP as token IDs, KV through shared memory."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import ClassVar, NamedTuple

from msgspec import structs
from pydantic import BaseModel

from pdd_runtime.clock import now
from pdd_runtime.errors import Cancelled, EngineError, PddError, RequestError
from pdd_runtime.kv import KvLayout, seed
from pdd_runtime.models.source import Found, find_model
from pdd_runtime.models.tokenizer import from_directory
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
    Sampling,
    Stopped,
    TokenizerFiles,
)
from pdd_runtime.server.blocks import Blocks
from pdd_runtime.server.bridge import Bridge, Geometry
from pdd_runtime.server.config import ServerConfig
from pdd_runtime.server.geometry import Model, read_geometry, read_model
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.launch import Launch
from pdd_runtime.server.metrics import Metrics, scrape
from pdd_runtime.server.process import ServerProcess, free_port
from pdd_runtime.server.readiness import wait_ready
from pdd_runtime.server.request import Event, Piece, Served
from pdd_runtime.waiting import over

log = logging.getLogger(__name__)

PULSE = 1.0
"""Seconds between two looks at the server: its metrics, and whether it still answers."""
MISSED = 10
"""Looks in a row without an answer, after which a server counts as dead."""
PROBE = "probe"


class Readings(NamedTuple):
    """What a server says of itself in its metrics."""

    running: int
    waiting: int


class ServerEngine(Engine):
    """Starts a stock server, or attaches to one, and drives it. A subclass says what is run (`launch`), what the server
    can do (`inspect`), and how a stream of tokens is asked for (`generate`).

    KV reaches the worker's store, and comes from there, by the package `pdd_connector` in the server. The store is the
    truth about what is cached here: a server's own cache only saves copies.
    """

    Config: ClassVar[type[BaseModel]] = ServerConfig
    config: ServerConfig
    health: ClassVar[str] = "/health"
    metrics: ClassVar[str] = "/metrics"
    scheduler: ClassVar[bool] = False
    """Whether its connector has a part in the server's scheduler that dials by itself."""

    def __init__(self, config: BaseModel, model: ModelSpec) -> None:
        super().__init__(config, model)
        self._exits = AsyncExitStack()
        self._served: dict[Served, asyncio.Task[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._watch: asyncio.Task[None] | None = None
        self._info: EngineInfo | None = None
        self._readings = Readings(0, 0)
        self._closing: asyncio.Task[None] | None = None
        self._refusal: EngineError | None = EngineError("the engine has not started")

    @classmethod
    def foresee(cls, model: ModelSpec, config: BaseModel) -> KvLayout | None:
        assert isinstance(config, ServerConfig)
        try:
            found = find_model(model.source)
        except EngineError:
            return None  # it may well be on the host where the worker will run
        path = cls._directory(found)
        return read_geometry(path, dtype=model.dtype, block_size=config.block_size, tp=config.tp)

    @abstractmethod
    def launch(self, model: Path, port: int, socket: str) -> Launch:
        """The server for the model in that directory, on 127.0.0.1:`port`, whose connector dials `socket`. Pure."""

    @abstractmethod
    async def inspect(self, http: HttpClient) -> Capabilities:
        """What the server that runs can do. Raises `EngineError` where it cannot be driven, e.g. for its version."""

    @abstractmethod
    def generate(
        self, http: HttpClient, id: str, tokens: Sequence[int], max_tokens: int, sampling: Sampling, salt: str
    ) -> AsyncGenerator[Piece, None]:
        """New tokens as the server makes them, at least one of them asked for; to its end after `max_tokens`, or after
        a stop token, which is sent as well. Closing it aborts the request and frees all it has there. `id` is what the
        connector calls the transfer. Positions begin at `len(tokens)`."""

    def readings(self, metrics: Metrics) -> Readings:
        raise NotImplementedError(f"{self.name} says nothing of its load")

    async def look(self, http: HttpClient) -> Readings:
        """How busy the server is. By default what `readings` finds at the path `metrics`, in Prometheus' form."""
        return self.readings(scrape(await http.get_text(self.metrics)))

    async def start(self, host: EngineHost) -> EngineInfo:
        if self._info is not None:
            return self._info
        if self.model.mode == "exact":
            raise EngineError(
                f"{self.name} has no exact mode",
                where="spec.model.mode",
                why="a server's arithmetic depends on what else is in a batch",
                fix="set mode: fast, or use an engine whose mode is exact (torch)",
            )
        try:
            self._info = await self._start(host)
        except BaseException:
            await self._exits.aclose()
            raise
        self._refusal = None
        return self._info

    async def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        served = self._serve(request, len(request.tokens) + 1, announces=True)
        async with self._serving(served, served.prefill):
            while not isinstance(event := await served.next(), Stopped):
                if not isinstance(event, Extended):
                    yield event

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        end = min(len(request.tokens) + request.max_tokens, self._model.context)
        served = self._serve(request, end)
        wanted = end - len(request.tokens)
        async with self._serving(served, lambda: served.decode(wanted, hold=request.hold)):
            event: Event | None = None
            while not isinstance(event, Stopped) or request.hold:
                # After the stop of a held request this waits until the stream is closed, and raises what ends it.
                event = await served.next()
                if not isinstance(event, BlocksReady):
                    yield event

    async def seal(self, request_id: str, tokens: int) -> None:
        for served in self._named(request_id):
            if not served.announces:  # a prefill makes its one token in any case
                served.seal(tokens)

    async def cancel(self, request_id: str) -> None:
        self._end(self._named(request_id), Cancelled("the request was cancelled", where=f"request {request_id}"))

    async def cached(self, tokens: Sequence[int], salt: str = "") -> int:
        return self._store.cached(self._root(salt), tokens)

    async def load(self) -> Load:
        stats = self._store.stats
        # A reading is of a moment ago, and a server that was told to abort may take a while.
        readings = self._readings if self._served else Readings(0, 0)
        return Load(
            running=readings.running,
            waiting=readings.waiting,
            batch_limit=self.config.batch_limit,
            blocks_used=stats.used,
            blocks_cached=stats.cached,
            blocks_total=stats.total,
            sessions=len(self._served),
        )

    async def tokenizer(self) -> TokenizerFiles:
        return from_directory(self._path)

    async def drain(self) -> None:
        self._refusal = self._refusal or EngineError("the engine is draining", fix="use another worker")
        await self._idle.wait()

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"closing {self.name}")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._refusal = EngineError("the engine is closed")
        self._end(self._served, self._refusal)
        await self._idle.wait()
        await self._exits.aclose()

    async def _start(self, host: EngineHost) -> EngineInfo:
        config = self.config
        found = find_model(self.model.source)
        # Whole: the server runs in a directory of its own.
        self._path = self._directory(found).resolve()
        self._model = model = await asyncio.to_thread(self._read_model)
        blocks = max(1, config.kv_memory // model.layout.block_bytes)
        self._store = host.open_store(model.layout, blocks, shared=True)
        await self._connect()
        capabilities = await self._bring_up()
        self._watch = asyncio.create_task(self._look_after(host), name=f"watching {self.name}")
        self._exits.push_async_callback(self._stop_watching)
        log.info("%s serves: %s, %d tokens in its own cache", self._bridge.engine, found.name, self._bridge.capacity)
        return EngineInfo(
            model=found.name,
            fingerprint=model.fingerprint,
            layout=model.layout,
            capacity_blocks=blocks,
            context_length=model.context,
            batch_limit=config.batch_limit,
            capabilities=capabilities,
        )

    @classmethod
    def _directory(cls, found: Found) -> Path:
        """Raises `EngineError` where it is none."""
        if not found.path.is_dir():
            raise EngineError(
                f"{cls.name} reads no {found.path.suffix} file",
                where=str(found.path),
                fix="give spec.model.source a directory with config.json, *.safetensors and tokenizer.json",
            )
        return found.path

    def _read_model(self) -> Model:
        """In a thread: it reads every byte of the weights for their digest."""
        model = read_model(self._path, dtype=self.model.dtype, block_size=self.config.block_size, tp=self.config.tp)
        if self.config.context_length is not None:
            model = structs.replace(model, context=min(model.context, self.config.context_length))
        return model

    async def _connect(self) -> None:
        """Listen for the connector; a directory of our own, for the socket and what the server is given."""
        directory = Path(tempfile.mkdtemp(prefix="pdd-"))
        self._place = directory
        self._exits.callback(shutil.rmtree, directory, ignore_errors=True)
        layout = self._model.layout
        geometry = Geometry(layout.layers, layout.kv_heads, layout.head_dim, layout.dtype, layout.block_size)
        path = self.config.socket or directory / "agent"
        self._bridge = Bridge(self._store, path, expects=geometry, ranks=self.config.tp, scheduler=self.scheduler)
        await self._bridge.start()
        self._exits.push_async_callback(self._bridge.close)

    async def _bring_up(self) -> Capabilities:
        """A server that has made a token, with its connector. Raises `EngineError` with what the server said last."""
        config = self.config
        self._process: ServerProcess | None = None
        url = config.url
        if url is None:
            port = config.port or free_port()
            launch = self.launch(self._path, port, str(self._bridge.path))
            directory = self._place / "server"
            directory.mkdir(mode=0o700)
            self._process = ServerProcess(self.name, directory)
            self._exits.push_async_callback(self._process.stop)
            await self._process.start(launch)
            url = f"http://127.0.0.1:{port}"
        self._http = HttpClient(url)
        self._exits.push_async_callback(self._http.close)
        deadline = now() + config.start_timeout
        await wait_ready(self._http, self._process, self.health, self._probe, timeout=config.start_timeout)
        try:
            async with asyncio.timeout(max(1.0, deadline - now())):
                await self._bridge.ready()
        except TimeoutError:
            raise EngineError(
                f"{self.name} makes tokens, but no connector has come from it",
                where=str(self._bridge.path),
                fix="install pdd-connector into the server's environment, and start the server with the flags that "
                "`pdd-runtime render engine` prints",
            ) from None
        return await self.inspect(self._http)

    async def _probe(self) -> None:
        """A real token, outside the connector's business."""
        async with aclosing(self.generate(self._http, PROBE, (1, 2), 1, Sampling(temperature=0), "")) as pieces:
            async for _ in pieces:
                pass

    async def _look_after(self, host: EngineHost) -> None:
        """Until the server is dead; then nothing is served any more."""
        ended: list[asyncio.Future[EngineError]] = [self._bridge.broken]
        if self._process is not None:
            ended.append(self._process.ended)
        pulse = asyncio.create_task(self._pulse(), name=f"pulse of {self.name}")
        try:
            done, _ = await asyncio.wait({pulse, *ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pulse.cancel()
            await asyncio.wait({pulse})
        self._refusal = next((future.result() for future in ended if future in done), None) or pulse.result()
        self._end(self._served, self._refusal)
        host.failed(self._refusal)

    async def _pulse(self) -> EngineError:
        """Read the metrics now and then; return when the server has not answered for long."""
        missed = 0
        while True:
            try:
                async with asyncio.timeout(PULSE * MISSED):
                    self._readings = await self.look(self._http)
                missed = 0
            except (PddError, TimeoutError) as error:
                missed += 1
                if missed >= MISSED:
                    return EngineError(f"{self.name} does not answer any more", where=self._http.url, why=str(error))
            await asyncio.sleep(PULSE)

    async def _stop_watching(self) -> None:
        assert self._watch is not None
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch

    def _serve(self, request: PrefillRequest | DecodeRequest, end: int, *, announces: bool = False) -> Served:
        """Raises `EngineError` when none are taken, `RequestError` and `CapacityError` when this one never can be."""
        if self._refusal is not None:
            raise self._refusal
        assert self._info is not None
        where, tokens, sampling = f"request {request.id}", request.tokens, request.sampling
        needed = -(-len(tokens) // self._store.layout.block_size)
        check_request(
            request, vocab=self._model.vocab, context=self._model.context, needed=needed, blocks=self._store.blocks
        )
        if lacking := set(sampling.needs) - self._info.capabilities.names:
            raise RequestError(f"the engine cannot do this: {', '.join(sorted(lacking))}", where=where)
        if not self._bridge.connected:
            raise EngineError(f"{self.name} has lost its connector", where=where, fix="see the server's log")
        most = max(1, end - len(tokens))
        # To a server, what was made elsewhere is prompt.
        made = len(tokens) - request.prompt_tokens if isinstance(request, DecodeRequest) else 0
        sampling = structs.replace(sampling, min_tokens=max(0, sampling.min_tokens - made))

        def generate(id: str) -> AsyncGenerator[Piece, None]:
            return self.generate(self._http, id, tokens, most, sampling, request.salt)

        return Served(
            request.id,
            Blocks(self._store, self._root(request.salt), tokens),
            self._bridge,
            generate,
            salt=request.salt,
            stop_token_ids=sampling.stop_token_ids,
            announces=announces,
        )

    @asynccontextmanager
    async def _serving(self, served: Served, run: Callable[[], Awaitable[None]]) -> AsyncGenerator[None, None]:
        """The request runs; at the end, whatever ends it, all it held is free."""
        task = self._served[served] = asyncio.create_task(self._run(served, run), name=f"{self.name} {served.id}")
        self._idle.clear()
        try:
            yield
        finally:
            task.cancel()
            try:
                await over(task)
            finally:
                self._release(served)  # one that was cancelled before it ran has not done so itself

    async def _run(self, served: Served, run: Callable[[], Awaitable[None]]) -> None:
        try:
            await run()
        except PddError as error:
            served.fail(error)
        except Exception as error:
            log.exception("request %s failed", served.id)
            why = f"{type(error).__name__}: {error}"
            served.fail(EngineError(f"{self.name} failed", where=f"request {served.id}", why=why))
        finally:
            self._release(served)

    def _release(self, served: Served) -> None:
        """Idempotent."""
        served.blocks.release()
        self._served.pop(served, None)
        if not self._served:
            self._idle.set()

    def _end(self, served: Iterable[Served], error: PddError) -> None:
        for one in tuple(served):
            one.fail(error)
            self._served[one].cancel()

    def _named(self, request_id: str) -> list[Served]:
        return [served for served in self._served if served.id == request_id]

    def _root(self, salt: str) -> bytes:
        return seed(self._model.fingerprint, self._model.layout.spec, salt=salt)
