"""What a session is asked for, and how it ends."""

from __future__ import annotations

from typing import Literal

import msgspec
import xxhash

from pdd_runtime.plugins.engine import Sampling
from pdd_runtime.plugins.routing import RequestFacts


class SessionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to continue."""

    id: str
    tokens: tuple[int, ...]
    """The prompt, never empty."""
    max_tokens: int
    """At least 1."""
    sampling: Sampling
    seeded: bool = False
    """The user gave the seed: whoever goes on must draw the very tokens that another would have drawn."""
    salt: str = ""
    """The tenant's: requests of different salts share no KV."""
    tenant: str = ""
    """Who asks: the name of an API key, empty where the graph has none. Shares are by tenant."""
    priority: int = 0
    """Lower ones are admitted earlier."""
    single: bool = False
    """Nothing will build on it: its KV need not be kept for a next turn."""
    variant: str = ""
    """Of the graph's, where it has several: whose policy, strategy and pools serve it."""
    beside: str = ""
    """The id of a request in flight with the same prompt. As long as that one runs and its workers are there, this one
    takes the same: what they have of the prompt, and what is on its way to them, is then there for both."""

    @property
    def lot(self) -> int:
        """What it draws by among workers that are as good as each other: `RequestFacts.seed`."""
        return xxhash.xxh32_intdigest(self.id.encode())

    @property
    def facts(self) -> RequestFacts:
        """What policies are told of it."""
        return RequestFacts(
            prompt_tokens=len(self.tokens),
            max_tokens=self.max_tokens,
            needs=self.sampling.needs,
            single=self.single,
            seed=self.lot,
        )


class Finish(msgspec.Struct, frozen=True):
    """The last thing a session says."""

    reason: Literal["stop", "length"]
    """`stop`: the last token is a stop token. `length`: max_tokens are out, or the context is full."""
    cached_tokens: int
    """Prompt tokens that needed no computing where the prompt was prefilled."""
