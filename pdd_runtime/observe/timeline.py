"""What happened to one request, when, and where: the body of `GET /pdd/requests/{id}`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from pdd_runtime.clock import now
from pdd_runtime.errors import NoRoute, PddError


class Cached(msgspec.Struct):
    """Leading prompt tokens whose KV was there before the request came; None: not known (yet), or no such tier."""

    prefill: int | None = None
    main: int | None = None


class Tokens(msgspec.Struct):
    """Output tokens that the user got, by the tier that made them. An aggregated worker counts as main."""

    prefill: int = 0
    relay: int = 0
    main: int = 0


class KvTransfer(msgspec.Struct):
    """One edge's KV. Times are seconds from arrival. Where engines move it themselves, bytes are computed from tokens:
    nobody counts what they send."""

    edge: str
    """`source->target`, pools by name."""
    bytes: int = 0
    blocks_sent: int = 0
    blocks_cached: int = 0
    """Not sent, because the target had them."""
    bytes_cached: int = 0
    """What those would have been on the wire."""
    started: float = 0.0
    finished: float | None = None
    """None: under way, or failed (an event then says why)."""
    goodput: float = 0.0
    """Bytes per second, over the transfer as its receiver saw it."""


class HandoffRecord(msgspec.Struct):
    """How decoding passed from relay to main."""

    strategy: str
    sealed_at: int | None = None
    """Output tokens at the seal; None: not sealed (yet)."""
    extended: int = 0
    """Output tokens whose KV main computed before it decoded."""
    rounds: int = 0
    """Extends while the relay went on."""
    gap: float | None = None
    """Seconds between the last token before the seal and main's first, as the user got them."""


class RecoveryRecord(msgspec.Struct):
    """A worker failed the request, which went on elsewhere."""

    t: float
    """Seconds from arrival, when it was noticed."""
    role: str
    worker: str
    """`pool/index`."""
    reason: str
    """The error's code, such as `worker-lost`, `silent`, `engine` or `capacity`."""
    why: str
    """The error."""
    to: str = ""
    """Who took over; empty: nobody (yet)."""


class Event(msgspec.Struct):
    """`what` is a fixed word or two, then, where there is more to say, a colon and details for people.

    | of | in order, as far as the route has them |
    |---|---|
    | the driver | leaves its variant, queued, admitted, route, seal, finish, cancelled, error, settling failed |
    | the driver | goes on |
    | who failed | lost |
    | prefill | prefill starts, prefill ends, first token |
    | a receiver | KV from POOL starts, KV from POOL ends, KV from POOL failed |
    | relay | relay starts, relay stops, relay lost, seal failed |
    | main | recomputed, extended, main starts, commit, main stops, settled |
    """

    t: float
    worker: str
    """`pool/index`; empty: the session driver."""
    what: str


class Body(msgspec.Struct, kw_only=True):
    """The keys and their order are part of the API."""

    id: str
    graph: str
    variant: str = ""
    route: str = ""
    reason: str = ""
    prompt_tokens: int = 0
    cached: Cached = msgspec.field(default_factory=Cached)
    tokens: Tokens = msgspec.field(default_factory=Tokens)
    kv: list[KvTransfer] = []
    handoff: HandoffRecord | None = None
    recoveries: list[RecoveryRecord] = []
    events: list[Event] = []
    finish_reason: str | None = None
    error: str | None = None


class Timeline:
    """Records one request while it runs; `body()` may be asked at any time."""

    def __init__(self, id: str, graph: str, prompt_tokens: int, *, variant: str = "", clock: Callable[[], float] = now):
        self._clock, self._arrived = clock, clock()
        self._body = Body(id=id, graph=graph, variant=variant, prompt_tokens=prompt_tokens)
        self.elsewhere: Literal["", "failed", "incapable"] = ""
        """Others than its variant serve it, all of it or from some token on: the variant has no workers for it any
        more, or none that can do what it asks for."""

    @property
    def variant(self) -> str:
        """Empty: its graph has none."""
        return self._body.variant

    @property
    def elapsed(self) -> float:
        """Seconds since arrival."""
        return self._clock() - self._arrived

    @property
    def cached(self) -> Cached:
        return self._body.cached

    @property
    def tokens(self) -> Tokens:
        return self._body.tokens

    @property
    def handoff(self) -> HandoffRecord | None:
        return self._body.handoff

    def routed(self, kind: str, reason: str) -> None:
        """The route is chosen."""
        self._body.route, self._body.reason = kind, reason
        self.event("", f"route: {kind}")

    def leaves_variant(self, error: PddError, to: str) -> None:
        """Its variant has no workers for it, so another variant's serve it."""
        self.elsewhere = "failed" if isinstance(error, NoRoute) else "incapable"
        self.event("", f"leaves its variant: {to} serves it, {self._body.variant} cannot: {error.what}")

    def event(self, worker: object, what: str) -> None:
        """Something happened now at `worker` (its `pool/index` form)."""
        self._body.events.append(Event(self.elapsed, str(worker), what))

    def transfer(self, source: str, target: str) -> KvTransfer:
        """A transfer from pool to pool begins now; its receiver's counts are written into what this returns."""
        transfer = KvTransfer(f"{source}->{target}", started=self.elapsed)
        self._body.kv.append(transfer)
        return transfer

    def arrived(self, source: str, target: str) -> bool:
        """KV from pool to pool has come, all of it."""
        edge = f"{source}->{target}"
        return any(transfer.edge == edge and transfer.finished is not None for transfer in self._body.kv)

    def when(self, what: str) -> float | None:
        """When `what` happened first, by the fixed words of its event; None: it has not."""
        return next((event.t for event in self._body.events if event.what.partition(":")[0] == what), None)

    def hands_off(self, strategy: str) -> HandoffRecord:
        """The request has a relay, and `strategy` decides when main takes over."""
        self._body.handoff = HandoffRecord(strategy)
        return self._body.handoff

    def recovers(self, role: str, worker: object, reason: str, error: BaseException) -> RecoveryRecord:
        """`worker` failed the request, which goes on. Who takes over is written into what this returns."""
        why = str(getattr(error, "what", error))
        recovery = RecoveryRecord(self.elapsed, role, str(worker), reason, why)
        self._body.recoveries.append(recovery)
        self.event(worker, f"lost: {why}")
        return recovery

    def finished(self, reason: str) -> None:
        """The user has the whole answer."""
        self._body.finish_reason = reason
        self.event("", f"finish: {reason}")

    def cancelled(self, why: str = "the client went away before the answer was complete") -> None:
        """Somebody ended it. Says nothing where the end was told already."""
        if self._body.finish_reason is None and self._body.error is None:
            self._body.error = f"cancelled: {why}"
            self.event("", "cancelled")

    def failed(self, error: BaseException) -> None:
        """The request ended with `error`, and the user was told so."""
        self._body.error = str(error) or type(error).__name__
        self.event("", f"error: {type(error).__name__}")

    def body(self) -> dict[str, Any]:
        """The timeline as plain JSON values, as far as it has come."""
        body: dict[str, Any] = msgspec.to_builtins(self._body)
        return body


class Timelines:
    """The timelines of the last `limit` requests, running ones among them."""

    def __init__(self, limit: int = 1000) -> None:
        self.limit = limit
        self._timelines: OrderedDict[str, Timeline] = OrderedDict()

    def __len__(self) -> int:
        return len(self._timelines)

    def begin(self, id: str, graph: str, prompt_tokens: int, *, variant: str = "") -> Timeline:
        """A timeline that starts now. It replaces one of the same id, and the oldest where there are too many."""
        timeline = Timeline(id, graph, prompt_tokens, variant=variant)
        self._timelines.pop(id, None)
        self._timelines[id] = timeline
        while len(self._timelines) > self.limit:
            self._timelines.popitem(last=False)
        return timeline

    def get(self, id: str) -> Timeline | None:
        return self._timelines.get(id)
