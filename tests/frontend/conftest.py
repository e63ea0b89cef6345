from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import cast

import httpx
import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pdd_runtime.errors import RequestError
from pdd_runtime.frontend.app import create_app
from pdd_runtime.frontend.doors import Access
from pdd_runtime.frontend.language import Language
from pdd_runtime.frontend.server import MOST, create_server, listen, url
from pdd_runtime.frontend.service import Service
from pdd_runtime.graph.models import FrontendTls
from pdd_runtime.kv import KvLayout
from pdd_runtime.observe import Timelines
from pdd_runtime.pipeline import Driver, Finish, SessionRequest
from pdd_runtime.plugins.engine import Capabilities, EngineInfo, Token, TokenizerFiles
from pdd_runtime.testing.byte_tokenizer import byte_tokenizer
from tests.waiting import PATIENCE

CORPUS = [
    "The relay goes on while the main worker extends what it knows.",
    "你好，世界！今天天气很好。 日本語のテキスト。",
    "👩‍👩‍👧 emoji 🎉🎉 and naïve café, Straße, Ωμέγα",
    "def main() -> None:\n    print('hello, world')\n",
] * 8


@pytest.fixture(scope="session")
def byte_level() -> Language:
    """A byte-level BPE, as GPT-2, Llama 3, Qwen and SmolLM2 have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    return Language(TokenizerFiles(tokenizer_json=tokenizer.to_str(), chat_template=None, eos_token_ids=(1,)))


@pytest.fixture(scope="session")
def sentencepiece() -> Language:
    """Spaces as U+2581, unknown characters as bytes, first space stripped, as Llama 2 and Mistral have it."""
    letters = sorted({c for text in CORPUS[:1] + CORPUS[3:4] for c in text.replace(" ", "▁")} | {"好", "▁"})
    words = ["▁the", "▁main", "er", "▁w", "or", "▁wor", "▁▁"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("e", "r"), ("▁", "w"), ("o", "r"), ("▁w", "or"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Language(TokenizerFiles(tokenizer_json=tokenizer.to_str(), chat_template=None, eos_token_ids=(2,)))


@pytest.fixture(scope="session")
def bytes_language() -> Language:
    """A token per byte: every split of a character over tokens happens."""
    return Language(byte_tokenizer())


class GivenDriver:
    """The driver's interface in this process; what a session yields is a script: what it gives, in order, is a
    token's bytes, an error to raise, an event to wait for, or a Finish. For the API's shape only."""

    cached = 3
    """Cached tokens of an answer that was stopped."""

    def __init__(self, *script: object, able: bool = True, template: str | None = None, context: int = 256) -> None:
        """`able`: has all capabilities that a request can need. `template`: another chat template than the default."""
        self.script, self.template = script, template
        self.ready, self.why_not_ready = True, ""
        self.requests: list[SessionRequest] = []
        self.closed: list[str] = []
        self.stops: dict[str, asyncio.Event] = {}
        self.sessions = 0
        self.said = 0
        """Tokens, of all sessions."""
        self._info = EngineInfo(
            model="given",
            fingerprint="f",
            layout=KvLayout(layers=1, kv_heads=1, head_dim=2, dtype="float32", block_size=16),
            capacity_blocks=64,
            context_length=context,
            batch_limit=16,
            capabilities=Capabilities(logprobs=able, penalties=able, logit_bias=able, min_tokens=able, guided=able),
        )

    async def info(self) -> EngineInfo:
        return self._info

    async def tokenizer(self) -> TokenizerFiles:
        files = byte_tokenizer()
        return files if self.template is None else msgspec.structs.replace(files, chat_template=self.template)

    def workers(self) -> list[object]:
        return []

    def links(self) -> tuple[object, ...]:
        return ()

    collectors = ()

    def stop(self, id: str) -> None:
        self.stops[id].set()

    async def deliver(self, request: SessionRequest, put: Callable[[Token | Finish], None]) -> None:
        async with aclosing(self.run(request)) as items:
            async for made in items:
                put(made)

    async def run(self, request: SessionRequest) -> AsyncGenerator[Token | Finish, None]:
        self.requests.append(request)
        if lacking := set(request.sampling.needs) - self._info.capabilities.names:
            raise RequestError(f"pool main cannot: {', '.join(sorted(lacking))}")
        stop = self.stops[request.id] = asyncio.Event()
        self.sessions += 1
        position = len(request.tokens)
        try:
            for made in self.script:
                if stop.is_set():
                    break
                if isinstance(made, bytes):
                    for number, id in enumerate(made, 1):
                        if number % 256 == 0:
                            await asyncio.sleep(0)  # others run, as between two reads of a worker's tokens
                        if stop.is_set():
                            break
                        top = ((id, -0.5), (0xF0, -2.0)) if request.sampling.logprobs else ()
                        yield Token(position, id, None if request.sampling.logprobs is None else -0.5, top)
                        position, self.said = position + 1, self.said + 1
                elif isinstance(made, int):
                    yield Token(position, made, None if request.sampling.logprobs is None else -0.5)
                    position += 1
                elif isinstance(made, asyncio.Event):
                    waits = [asyncio.create_task(event.wait()) for event in (made, stop)]
                    try:
                        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for wait in waits:
                            wait.cancel()
                elif isinstance(made, Exception):
                    raise made
                elif isinstance(made, Finish):
                    yield made
                    return
            if stop.is_set():
                yield Finish("stop", self.cached)
        finally:
            self.sessions -= 1
            self.closed.append(request.id)


@dataclass
class Given:
    """A server over a given driver."""

    driver: GivenDriver
    service: Service
    url: str
    client: httpx.AsyncClient


@pytest.fixture
async def given() -> AsyncIterator[Callable[..., Awaitable[Given]]]:
    """Call it with a script (see GivenDriver): a real server on a real socket."""
    async with AsyncExitStack() as stack:

        async def start(
            *script: object,
            able: bool = True,
            template: str | None = None,
            context: int = 256,
            access: Access | None = None,
            deadline: float | None = None,
            most: int = MOST,
            tls: FrontendTls | None = None,
        ) -> Given:
            driver = GivenDriver(*script, able=able, template=template, context=context)
            service = Service(cast(Driver, driver), Timelines(), deadline)
            sock = stack.enter_context(listen("127.0.0.1", 0))
            server = create_server(create_app(service, access=access), most, tls)
            serving = asyncio.create_task(server.serve(sockets=[sock]))

            async def stop() -> None:
                server.stop()
                await serving

            stack.push_async_callback(stop)
            at = url(sock, tls=tls is not None)
            client = await stack.enter_async_context(httpx.AsyncClient(base_url=at, timeout=PATIENCE))
            return Given(driver, service, at, client)

        yield start
