"""An engine that is a server of its own: requests go to it over HTTP as token IDs."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from pathlib import Path
from typing import ClassVar

from msgspec import structs
from pydantic import BaseModel

from pdd_runtime.clock import now
from pdd_runtime.errors import Cancelled, EngineError, RequestError
from pdd_runtime.ids import new_id
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
    Offer,
    OfferRequest,
    PrefillEvent,
    PrefillRequest,
    Received,
    ReceiveRequest,
    Sampling,
    Stopped,
    TokenizerFiles,
    Tokens,
)
from pdd_runtime.server.config import ServerConfig
from pdd_runtime.server.geometry import Model, read_geometry, read_model
from pdd_runtime.server.http import HttpClient
from pdd_runtime.server.launch import Launch
from pdd_runtime.server.metrics import Metrics, scrape
from pdd_runtime.server.native import NativePlane
from pdd_runtime.server.plane import DataPlane, Readings
from pdd_runtime.server.process import ServerProcess, free_port
from pdd_runtime.server.pulse import Pulse
from pdd_runtime.server.readiness import wait_ready
from pdd_runtime.server.request import Event, Piece, Running, ServerRequest
from pdd_runtime.server.requests import Requests
from pdd_runtime.server.shared import SharedPlane

__all__ = ["Readings", "ServerEngine"]

log = logging.getLogger(__name__)


class ServerEngine(Engine):
    """Starts a stock server, or attaches to one, and drives it. A subclass says what is run (`launch`), what the server
    can do (`inspect`), and how a stream of tokens is asked for (`generate`).

    What its KV goes by is its data plane (`plane`): shared memory, with the package `pdd_connector` in the server, or
    the server's own transfer. All else is the same for both, and here.
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
        self._plane = self.plane()
        self._requests = Requests(self.name)
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

    def plane(self) -> DataPlane:
        """What its KV goes by; a `NativePlane` where its configuration says so, and `promises` as well. Called once, at
        the end of `__init__` of this class."""
        return SharedPlane(self.name, self.config, scheduler=self.scheduler)

    @abstractmethod
    def launch(self, model: Path, port: int, socket: str) -> Launch:
        """The server for the model in that directory, on 127.0.0.1:`port`. `socket`: the path where its connector dials
        the worker or, over a native plane, where it may listen for it. Pure."""

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
        served = self._serve(request, len(request.tokens) + 1)
        async with self._requests.running(served, served.prefill):
            while not isinstance(event := await self._next(served), Stopped):
                if isinstance(event, BlocksReady | Tokens):
                    yield event

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        end = min(len(request.tokens) + request.max_tokens, self._model.context)
        served = self._serve(request, end)
        wanted = end - len(request.tokens)
        async with self._requests.running(served, lambda: served.decode(wanted, hold=request.hold)):
            event: Event | None = None
            while not isinstance(event, Stopped) or request.hold:
                # After the stop of a held request this waits until the stream is closed, and raises what ends it.
                event = await self._next(served)
                if isinstance(event, Extended | Tokens | Stopped):
                    yield event

    async def offer(self, request: OfferRequest) -> AsyncGenerator[Offer, None]:
        plane = self._native(request)
        served = plane.offer(request)
        async with self._requests.running(served, served.run):
            while not isinstance(event := await self._next(served), Stopped):
                assert isinstance(event, Offer)
                yield event

    async def receive(self, request: ReceiveRequest) -> AsyncGenerator[Received, None]:
        plane = self._native(request)
        served = plane.receive(request)
        async with self._requests.running(served, served.run):
            while True:
                event = await self._next(served)
                assert isinstance(event, Received)
                yield event

    async def seal(self, request_id: str, tokens: int) -> None:
        for served in self._requests.named(request_id):
            served.seal(tokens)

    async def cancel(self, request_id: str) -> None:
        cancelled = Cancelled("the request was cancelled", where=f"request {request_id}")
        self._requests.end(cancelled, self._requests.named(request_id))

    async def cached(self, tokens: Sequence[int], salt: str = "") -> int:
        return self._plane.cached(self._root(salt), tokens)

    async def load(self) -> Load:
        stats = self._plane.blocks(self._readings)
        # A reading is of a moment ago, and a server that was told to abort may take a while.
        readings = self._readings if self._requests else Readings(0, 0)
        return Load(
            running=readings.running,
            waiting=readings.waiting,
            batch_limit=self.config.batch_limit,
            blocks_used=stats.used,
            blocks_cached=stats.cached,
            blocks_total=stats.total,
            sessions=len(self._requests),
            silent=self._pulse.silent,
        )

    async def tokenizer(self) -> TokenizerFiles:
        return from_directory(self._path)

    async def drain(self) -> None:
        self._refusal = self._refusal or EngineError("the engine is draining", fix="use another worker")
        await self._requests.idle()

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"closing {self.name}")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._refusal = EngineError("the engine is closed")
        self._requests.end(self._refusal)
        await self._requests.idle()
        await self._exits.aclose()

    async def _start(self, host: EngineHost) -> EngineInfo:
        config = self.config
        found = find_model(self.model.source)
        # Whole: the server runs in a directory of its own.
        self._path = self._directory(found).resolve()
        self._model = model = await asyncio.to_thread(self._read_model)
        # A directory of our own, for sockets and what the server is given.
        place = Path(tempfile.mkdtemp(prefix="pdd-"))
        self._exits.callback(shutil.rmtree, place, ignore_errors=True)
        self._exits.push_async_callback(self._plane.close)
        await self._plane.open(host, model, place)
        capabilities = await self._bring_up(place)
        self._watch = asyncio.create_task(self._look_after(host), name=f"watching {self.name}")
        self._exits.push_async_callback(self._stop_watching)
        log.info("serves %s: %s", found.name, self._plane.told)
        return EngineInfo(
            model=found.name,
            fingerprint=model.fingerprint,
            layout=model.layout,
            capacity_blocks=self._plane.blocks(self._readings).total,
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

    async def _bring_up(self, place: Path) -> Capabilities:
        """A server that has made a token, with its data plane. Raises `EngineError` with what the server said last."""
        config = self.config
        self._process: ServerProcess | None = None
        url = config.url
        if url is None:
            port = config.port or free_port()
            launch = self.launch(self._path, port, str(self._plane.socket))
            directory = place / "server"
            directory.mkdir(mode=0o700)
            self._process = ServerProcess(self.name, directory)
            self._exits.push_async_callback(self._process.stop)
            await self._process.start(launch)
            url = f"http://127.0.0.1:{port}"
        self._http = HttpClient(url)
        self._exits.push_async_callback(self._http.close)
        deadline = now() + config.start_timeout
        await wait_ready(self._http, self._process, self.health, self._probe, timeout=config.start_timeout)
        await self._plane.meet(self._http, self._look, max(1.0, deadline - now()))
        self._pulse = Pulse(
            self.name,
            url,
            look=self._look,
            connected=lambda: self._plane.connected,
            probe=self._probe,
            busy=lambda: bool(self._requests),
            health_timeout=config.health_timeout,
            stall_timeout=config.stall_timeout,
        )
        return await self.inspect(self._http)

    async def _look(self) -> Readings:
        self._readings = await self.look(self._http)
        return self._readings

    async def _probe(self) -> None:
        """A real token, outside the data plane's business."""
        # Of a name of its own: SGLang aborts what has that of a request which has just ended.
        probing = self.generate(self._http, new_id("probe"), (1, 2), 1, Sampling(temperature=0), "")
        async with aclosing(probing) as pieces:
            async for _ in pieces:
                pass

    async def _look_after(self, host: EngineHost) -> None:
        """Until the server is dead; then nothing is served any more."""
        signs = (self._plane.broken, self._process.ended if self._process is not None else None)
        self._refusal = await self._pulse.death(*(sign for sign in signs if sign is not None))
        if self._process is not None:
            # One that hangs holds on to what its requests have here.
            self._process.kill()
        self._requests.end(self._refusal)
        host.failed(self._refusal)

    async def _stop_watching(self) -> None:
        assert self._watch is not None
        self._watch.cancel()
        with suppress(asyncio.CancelledError):
            await self._watch

    def _serve(self, request: PrefillRequest | DecodeRequest, end: int) -> ServerRequest:
        """Raises `EngineError` when none are taken, `RequestError` and `CapacityError` when this one never can be."""
        self._admit(request)
        most = max(1, end - len(request.tokens))
        # To a server, what was made elsewhere is prompt.
        made = len(request.tokens) - request.prompt_tokens if isinstance(request, DecodeRequest) else 0
        sampling = structs.replace(request.sampling, min_tokens=max(0, request.sampling.min_tokens - made))
        request = structs.replace(request, sampling=sampling)

        def generate(id: str) -> AsyncGenerator[Piece, None]:
            return self.generate(self._http, id, request.tokens, most, sampling, request.salt)

        return self._plane.request(request, self._root(request.salt), most, generate)

    def _native(self, request: OfferRequest | ReceiveRequest) -> NativePlane:
        """Raises `EngineError` where the plane is none, and as `_serve`."""
        if not isinstance(self._plane, NativePlane):
            raise EngineError(f"engine {self.name} has portable KV; the agent moves its blocks")
        self._admit(PrefillRequest(id=request.id, tokens=request.tokens, sampling=request.sampling, salt=request.salt))
        return self._plane

    def _admit(self, request: PrefillRequest | DecodeRequest) -> None:
        if self._refusal is not None:
            raise self._refusal
        assert self._info is not None
        needed = -(-len(request.tokens) // self._model.layout.block_size)
        blocks = self._plane.blocks(self._readings).total
        check_request(request, vocab=self._model.vocab, context=self._model.context, needed=needed, blocks=blocks)
        if lacking := set(request.sampling.needs) - self._info.capabilities.names:
            raise RequestError(
                f"the engine cannot do this: {', '.join(sorted(lacking))}", where=f"request {request.id}"
            )

    async def _next(self, running: Running) -> Event:
        event = await running.next()
        self._pulse.heard()
        return event

    def _root(self, salt: str) -> bytes:
        return seed(self._model.fingerprint, self._model.layout.spec, salt=salt)
