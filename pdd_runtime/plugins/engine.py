"""The engine contract: one engine per worker, few verbs, everything made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar, Literal, Protocol

import msgspec
from pydantic import BaseModel

from pdd_runtime.errors import EngineError
from pdd_runtime.graph import Role
from pdd_runtime.kv import BlockStore, CachedNames, KvLayout

OFFER_LIMIT = 64 * 1024
"""Bytes of an offer as it crosses the message plane, at most."""


class ModelSpec(BaseModel, frozen=True, extra="forbid"):
    """Which model, and how exactly it is computed. The same for every pool unless a pool says otherwise."""

    source: str
    """A name an engine plugin knows, a directory, or a GGUF file."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    mode: Literal["fast", "exact"] = "fast"
    """`exact`: prefill, extend and decode are bit-identical at any batch, at some cost in speed."""


class Guide(msgspec.Struct, frozen=True, kw_only=True):
    """The form the output must have. Its state is rebuilt from the output tokens of every request, so it passes a
    handoff as the token log does."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    text: str = ""
    """A JSON Schema, a regular expression, a JSON list of strings, or a Lark grammar; empty for `json_object`."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. The random number of a position depends on (seed, position) alone."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """64 bits; the frontend draws one where the user gives none."""
    logprobs: int | None = None
    """None: none. N: the chosen token's logprob and the N likeliest alternatives."""
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    """No stop token is drawn before so many output tokens."""
    frequency_penalty: float = 0.0
    """Taken from a token's logit for each time it is in the output so far (OpenAI's definition)."""
    presence_penalty: float = 0.0
    """Taken from a token's logit if it is in the output so far."""
    repetition_penalty: float = 1.0
    """A logit of a token in prompt or output is divided by it where positive, multiplied where negative
    (Keskar et al. 2019, arXiv 1909.05858)."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)."""
    guide: Guide | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        """The capabilities an engine must have for this, by name."""
        penalised = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)
        wanted = {
            "logprobs": self.logprobs is not None,
            "penalties": penalised,
            "logit_bias": bool(self.logit_bias),
            "min_tokens": self.min_tokens > 0,
            "guided": self.guide is not None,
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token."""

    position: int
    """Index in the whole sequence, prompt included."""
    id: int
    logprob: float | None = None
    """Natural log, of the unmodified distribution (temperature 1, no filters)."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest (token id, logprob), best first."""


class Offer(msgspec.Struct, frozen=True):
    """Native KV: what one reader needs to pull the KV that an engine keeps for it. Opaque to everybody else."""

    params: dict[str, Any]

    def __post_init__(self) -> None:
        if (size := len(msgspec.msgpack.encode(self.params))) > OFFER_LIMIT:
            raise ValueError(f"an offer of {size} bytes is over the limit of {OFFER_LIMIT}")


class OfferRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Have the KV of `tokens` ready here, or being made, for one reader."""

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling
    salt: str = ""
    reader: str
    """The reading pool."""
    timeout: float
    """Seconds for the reader to have all."""


class ReceiveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Have the KV of `tokens` here, from the engine that made the offer."""

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling
    salt: str = ""
    offer: Offer
    timeout: float
    """Seconds to have all."""


class PrefillRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Make the KV of `tokens` here, publish its blocks, sample the token after them."""

    id: str
    tokens: tuple[int, ...]
    sampling: Sampling
    salt: str = ""


class DecodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Known tokens in, next tokens out."""

    id: str
    tokens: tuple[int, ...]
    """Prompt and all output known so far."""
    prompt_tokens: int
    """How many of `tokens` are the prompt."""
    max_tokens: int
    """How many tokens to make at most; 0 only extends."""
    sampling: Sampling
    salt: str = ""
    hold: bool = False
    """When it stops, keep the sequence's blocks referenced until the stream is closed."""
    offer: Offer | None = None
    """Engines whose `extend` is `prefill_assisted` alone: by it the KV of all `tokens` is to be had."""


class BlocksReady(msgspec.Struct, frozen=True, tag="blocks"):
    """The KV of the first `tokens` tokens is published; `cached` of them were here before."""

    tokens: int
    cached: int


class Extended(msgspec.Struct, frozen=True, tag="extended"):
    """All known tokens' KV is here: `cached` were found, `computed` were computed in `passes` forward passes."""

    cached: int
    computed: int
    passes: int
    received: int = 0
    """How many of the cached ones came by the request's offer."""


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """New tokens in order of position, never empty."""

    tokens: tuple[Token, ...]


class Stopped(msgspec.Struct, frozen=True, tag="stopped"):
    """No more tokens come: `length` (max_tokens made, or nothing to make), `stop` (a stop token, which was
    the last one sent), or `sealed`. `tokens` is the sequence's length, prompt included. With `hold` the
    stream then stays open, and the blocks referenced, until the caller closes it."""

    reason: Literal["length", "stop", "sealed"]
    tokens: int


class Received(msgspec.Struct, frozen=True, tag="received"):
    """The KV asked for is here: that of `cached` leading tokens was before, that of `received` tokens has come."""

    cached: int
    received: int


PrefillEvent = BlocksReady | Tokens
DecodeEvent = Extended | Tokens | Stopped


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine can do, as data. Routes avoid workers that lack what a request needs (`Sampling.needs`); an engine
    that is asked all the same raises `RequestError`."""

    extend: Literal["local", "prefill_assisted"] = "local"
    """`prefill_assisted`: it computes no KV of known tokens; every decode brings an `Offer` over all of them."""
    kv: Literal["portable", "native"] = "portable"
    """`native`: the engine moves KV itself, by `offer` and `receive`, and opens no store."""
    fan_out: bool = True
    """One prefill can feed several readers. With native KV each of them has an offer of its own, also with this."""
    logprobs: bool = False
    seeded: bool = False
    position_keyed_sampling: bool = False
    exact: bool = False
    penalties: bool = False
    logit_bias: bool = False
    min_tokens: bool = False
    guided: bool = False

    @property
    def names(self) -> frozenset[str]:
        """Those of the yes-or-no ones that it has."""
        return frozenset(name for name in self.__struct_fields__ if getattr(self, name) is True)


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a started engine is."""

    model: str
    """The name users know it by."""
    fingerprint: str
    """Same weights and config: same fingerprint, in every engine."""
    layout: KvLayout
    capacity_blocks: int
    context_length: int
    batch_limit: int
    capabilities: Capabilities


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How busy a worker is now."""

    running: int = 0
    waiting: int = 0
    batch_limit: int = 1
    blocks_used: int = 0
    """Blocks that somebody references; 0 when nothing runs."""
    blocks_cached: int = 0
    blocks_total: int = 0
    sessions: int = 0
    """Engine requests and KV transfers in flight."""
    token_time: float | None = None
    """Seconds to compute a token of a prompt, by those of late; the worker measures it."""
    request_time: float | None = None
    """Seconds by which a request delays the one behind it, by those of late; the worker measures it."""
    silent: int = 0
    """Whole seconds without a sign of life: of a pass that goes on, of a server that does not answer."""


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """All that a frontend needs to speak the model's language."""

    tokenizer_json: str
    """In the form of the `tokenizers` library."""
    chat_template: str | None
    """Jinja2; None: the model has none."""
    eos_token_ids: tuple[int, ...]
    special_tokens: dict[str, str] = {}
    """`bos_token`, `eos_token`, … as the template names them."""


class EngineHost(Protocol):
    """What the worker gives its engine."""

    def open_store(self, layout: KvLayout, blocks: int, *, shared: bool = False) -> BlockStore:
        """Allocate the block memory that engine and KV agent share; `shared` for an engine in a process of its own.
        Called once, from `start`."""
        ...

    def open_names(self, layout: KvLayout) -> CachedNames:
        """Native KV: instead of a store, the names of what the engine has cached, which it keeps up to date. Called
        once, from `start`."""
        ...

    def failed(self, error: EngineError) -> None:
        """The engine can serve nothing more (its loop crashed): the worker says why, exits, and is started
        again. On the event loop."""
        ...


class Engine(ABC):
    """All methods run on the worker's event loop and never block it. Streams are closed by the caller to
    cancel: that must free everything the request held. Every method may be called twice."""

    name: ClassVar[str]
    Config: ClassVar[type[BaseModel]]
    """Where it has a field `kv_memory`, that is the bytes that its blocks may take, for `doctor`. Where it has `url` or
    `socket`, and it is set, that belongs to one worker alone. Where it has `data_plane`, engines with native KV
    exchange it only where that is the same."""
    role: Role = "aggregated"
    """Its pool's, for an engine that is another thing in another role. Whoever makes it sets this, before all else."""

    def __init__(self, config: BaseModel, model: ModelSpec) -> None:
        self.config, self.model = config, model

    @classmethod
    def promises(cls, model: ModelSpec, config: BaseModel) -> Capabilities | None:
        """What it will be able to do, so that `validate` can tell what a graph asks in vain; None: that is known
        only once it has started."""
        return None

    @classmethod
    def foresee(cls, model: ModelSpec, config: BaseModel) -> KvLayout | None:
        """The layout that its blocks will have, so that `validate` can tell which pools exchange KV; None: that is
        known only once it has started. Raises `EngineError` for a model that it can never serve."""
        return None

    @abstractmethod
    async def start(self, host: EngineHost) -> EngineInfo:
        """Load the model. Raises `EngineError`."""

    @abstractmethod
    def prefill(self, request: PrefillRequest) -> AsyncGenerator[PrefillEvent, None]:
        """`BlocksReady` as chunks finish (the last one covers the prompt, partial tail included), then one
        `Tokens` with the first token. Blocks are committed to the store before the event says so."""

    @abstractmethod
    def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
        """`Extended` once, then `Tokens`, then `Stopped`. Finds in the store what is cached and extends the
        rest; with `max_tokens=0` that is all. On stop it commits the partial tail, too."""

    def offer(self, request: OfferRequest) -> AsyncGenerator[Offer, None]:
        """Native KV only: have the KV of `tokens` ready here, or being made, for one reader. Yields one `Offer`, then
        stays open until the reader has it all, where it ends, or until the caller closes it: what is kept for the
        reader is then freed as soon as the engine can. Raises `EngineError` where the reader has failed."""
        raise EngineError(f"engine {self.name} has portable KV; the agent moves its blocks")

    def receive(self, request: ReceiveRequest) -> AsyncGenerator[Received, None]:
        """Native KV only: pull what is offered. Yields `Received` once it is here, then stays open until the caller
        closes it: the KV stays until then, if the engine can keep it. Raises `EngineError` where anything is unsure
        (the offer has expired, less came than was asked for): never is wrong KV used."""
        raise EngineError(f"engine {self.name} has portable KV; the agent moves its blocks")

    @abstractmethod
    async def seal(self, request_id: str, tokens: int) -> None:
        """Stop a decode when its sequence is `tokens` long (at once if it already is longer)."""

    @abstractmethod
    async def cancel(self, request_id: str) -> None:
        """Stop a request in any state and free what it holds."""

    @abstractmethod
    async def cached(self, tokens: Sequence[int], salt: str = "") -> int:
        """How many leading tokens' KV is here."""

    @abstractmethod
    async def load(self) -> Load: ...

    @abstractmethod
    async def tokenizer(self) -> TokenizerFiles: ...

    @abstractmethod
    async def drain(self) -> None:
        """Take no new requests; return when the running ones have ended, offers and what was received by them as
        well."""

    @abstractmethod
    async def close(self) -> None:
        """Free everything; running requests end with `EngineError`."""
