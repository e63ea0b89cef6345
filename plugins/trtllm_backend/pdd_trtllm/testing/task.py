"""One request in the stand-in's executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pdd_runtime.plugins.engine import Sampling
from pdd_trtllm.testing.disaggregation import Asked, Generation
from pdd_trtllm.testing.pages import Held

Finish = Literal["length", "stop", "cancelled"]


class Failed(str):
    """Why there are no tokens."""


OnTokens = Callable[[list[int], Finish | Failed | None], None]
"""New tokens, and why there are no more. In the executor's thread."""


class Task:
    """What a connector sees of it is `request_id`, `max_new_tokens` and `get_tokens`; the rest is the executor's."""

    def __init__(
        self,
        number: int,
        prompt: list[int],
        max_tokens: int,
        sampling: Sampling,
        include_stop: bool,
        on_tokens: OnTokens,
        asked: Asked = None,
    ) -> None:
        self.request_id = number
        self.asked: Asked = asked
        self.prompt = len(prompt)
        self.max_tokens, self.sampling, self.include_stop = max_tokens, sampling, include_stop
        self.on_tokens = on_tokens
        self.known = list(prompt)
        """Tokens that the scheduler knows."""
        self.device = list(prompt)
        """Those that the device has chosen by now: where passes overlap, one more."""
        self.computed = 0
        """Tokens whose KV is in the pages, once the passes that were begun are over."""
        self.held = Held()
        self.reused = 0
        self.begun = False
        self.ended = False
        self.receiving = False
        """The KV of its prompt is on its way from a context elsewhere."""
        self.shown_tokens = self.shown_pages = 0
        """What the connector was told."""

    def get_tokens(self, beam: int) -> list[int]:
        if beam != 0:
            raise IndexError("one beam")
        return list(self.known)

    @property
    def max_new_tokens(self) -> int:
        return self.max_tokens

    @property
    def in_context(self) -> bool:
        """Its prompt is not computed yet, and is to be."""
        return self.computed < self.prompt and not isinstance(self.asked, Generation)

    @property
    def full(self) -> bool:
        """The device has chosen all the tokens that were asked for."""
        return len(self.device) >= self.prompt + self.max_tokens

    @property
    def most(self) -> int:
        """Tokens that it may grow to."""
        return self.prompt + self.max_tokens
