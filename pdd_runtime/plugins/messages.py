"""What crosses the message plane to and from a worker, beside the contracts' own types.

| method | asks with | answers with |
|---|---|---|
| `engine.prefill` | `PrefillRequest` | stream of `PrefillEvent` |
| `engine.decode` | `DecodeRequest` | stream of `DecodeEvent` |
| `engine.offer` | `OfferRequest` | stream of one `Offer`, open until it is read or the caller closes it |
| `engine.receive` | `ReceiveRequest` | stream of one `Received`, open until the caller closes it |
| `engine.seal` | `Seal` | `None` |
| `engine.cancel` | `RequestId` | `None` |
| `engine.cached` | `Cached` | `int` |
| `engine.tokenizer` | `Empty` | `TokenizerFiles` |
| `engine.load` | `Empty` | `Load` |
| `kv.fetch` | `FetchRequest` | stream of `FetchEvent`, open until the caller closes it |
| `worker.watch` | `Empty` | stream of `WatchEvent` |
| `worker.watchers` | `Empty` | `tuple[str, ...]`: name and epoch of each that watches it |
| `worker.drain` | `Drain` | `None`, when nothing is left |
| `line.cut` | `LineCut` | `None`; only where a link that leads away is emulated |
| `process.vitals` | `Empty` | `Vitals`, of `pdd_runtime.observe` |
"""

from __future__ import annotations

import msgspec

from pdd_runtime.kv import KvLayout
from pdd_runtime.plugins.engine import Load
from pdd_runtime.plugins.transport import LinkTelemetry, TransferReport


class Empty(msgspec.Struct, frozen=True):
    """Nothing to say."""


class Drain(msgspec.Struct, frozen=True):
    """Take no new session, and let what has begun end."""

    patience: float = 8.0
    """Seconds; what is left then ends with `Cancelled`."""


class RequestId(msgspec.Struct, frozen=True):
    """One request, in whatever state it is."""

    id: str


class Seal(msgspec.Struct, frozen=True):
    """Stop the decode `id` when its sequence is `tokens` long."""

    id: str
    tokens: int


class Cached(msgspec.Struct, frozen=True):
    """How many leading tokens of `tokens` are here?"""

    tokens: tuple[int, ...]
    salt: str = ""


class FetchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Have the KV of `tokens` here, from the worker at `endpoint`; what is here already is not moved."""

    id: str
    """The request whose KV it is: the source waits for its blocks while the request runs there."""
    tokens: tuple[int, ...]
    transport: str
    """The transport plugin's name."""
    endpoint: str
    """Where the source serves that transport."""
    epoch: str
    """The source's epoch; another one is refused."""
    source: str = ""
    """The source's pool: it tells edges apart that use one transport with different settings. Empty: the first
    edge into this pool that uses the transport."""
    layout: KvLayout | None = None
    """How KV lies at the source; None: as it does here."""
    salt: str = ""
    priority: int = 0
    timeout: float = 60.0
    """Seconds, for the wait for room and the transfer together."""


class Fetching(msgspec.Struct, frozen=True, tag="fetching"):
    """At once: what the fetch has to do, in blocks as they are cut here."""

    blocks_cached: int
    """Here already, and retained."""
    blocks_wanted: int


class FetchProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Now and then: what has come so far."""

    blocks: int
    """As the source cuts them, as in the report at the end."""
    bytes: int
    """Of those blocks: what has crossed the network."""


class Fetched(msgspec.Struct, frozen=True, tag="fetched"):
    """Last: the transfer is over. The blocks stay retained until the caller closes the stream."""

    report: TransferReport
    cached_tokens: int
    """Leading tokens whose KV is here now."""


FetchEvent = Fetching | FetchProgress | Fetched


class WatchEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What changed in a worker since the last event; the first one has every name."""

    added: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    load: Load
    links: tuple[LinkTelemetry, ...] = ()
    """The way to every cluster that its transports have sent to."""
    yours: int = 0
    """Of the requests that run or wait there, those of who watches."""
    draining: bool = False
    """It takes no new session, and ends when all that watch it have closed this stream: whoever has no session left
    that needs it."""


class LineCut(msgspec.Struct, frozen=True):
    """Let nothing through on the emulated line to a cluster."""

    cluster: str
    seconds: float
    """From now."""
