"""What a request costs where it goes, in seconds. Pure.

    wait(prefill) + compute(prefill)      until the prompt's KV is made,
    + way + min(way, wait(relay))         its way to main: the link is taken so long, and so long a user waits for the
                                          second token, unless a relay decodes meanwhile (no relay: no end of wait),
    + wait(main)                          until main takes it.

    wait     requests there x what each delays the next one; on workers that decode, those of one batch share its steps,
             so that each delays half as much as one that must end first
    compute  tokens that are not cached there x time of a token
    way      round trip + silence + (bytes that wait for the link + bytes that main lacks) / goodput; 0 if it lacks none

Times and goodput are as measured, else the constants below.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdd_runtime.plugins.routing import LinkView, RequestFacts, WorkerView

TOKEN_TIME: Final = 1e-4
"""Seconds to compute a token of a prompt, where nobody has measured."""
REQUEST_TIME: Final = 0.1
"""Seconds that a request delays the next one where it decodes, where nobody has measured."""
TOKEN_BYTES: Final = 1 << 16
"""Of a token's KV, where the worker does not say."""
LOCAL_RATE: Final = 1.25e9
"""Bytes/s inside a cluster, and over a link of which nothing is known."""


def wait(facts: RequestFacts, worker: WorkerView) -> float:
    """Seconds until it is this request's turn there."""
    requests, each = worker.running + worker.waiting, worker.request_time
    if worker.role == "prefill":
        # Those ahead are taken to be like this one, where nothing better is known.
        return requests * (facts.prompt_tokens * token_time(worker) if each is None else each)
    beside = worker.batch_limit
    if requests < beside:
        beside = requests
    return (requests - beside / 2) * (REQUEST_TIME if each is None else each)


def compute(facts: RequestFacts, worker: WorkerView) -> float:
    """Seconds to make what is not cached there of the prompt's KV."""
    each, lacks = worker.token_time, facts.prompt_tokens - worker.cached_tokens
    return lacks * (TOKEN_TIME if each is None else each) if lacks > 0 else 0.0


class Way(msgspec.Struct, frozen=True, gc=False):
    """From a worker to others of one cluster."""

    start: float
    """Seconds until the first byte that is sent now is there."""
    token: float
    """Seconds more for each token's KV."""

    def takes(self, tokens: int) -> float:
        """Seconds until the KV of so many tokens is there."""
        return self.start + tokens * self.token if tokens else 0.0


def way(source: WorkerView, link: LinkView | None) -> Way:
    """KV's way from `source` over that direction of a link, or inside its cluster."""
    if link is None:
        return Way(0.0, local(source))
    rate = link.rate
    return Way(link.rtt + link.stalled + link.queue / rate, (source.token_bytes or TOKEN_BYTES) / rate)


def local(source: WorkerView) -> float:
    """Seconds that each token's KV takes inside the cluster of `source`."""
    return (source.token_bytes or TOKEN_BYTES) / LOCAL_RATE


def token_time(worker: WorkerView) -> float:
    return TOKEN_TIME if worker.token_time is None else worker.token_time


def lacking(facts: RequestFacts, worker: WorkerView) -> int:
    """Tokens of the prompt that are not cached there."""
    return max(0, facts.prompt_tokens - worker.cached_tokens)
