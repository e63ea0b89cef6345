"""The truth of a session: which token stands at which position, and who made it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from pdd_runtime.errors import EngineError
from pdd_runtime.plugins.engine import Token

Source = Literal["prefill", "relay", "main"]


class Entry(msgspec.Struct, frozen=True):
    # Not a NamedTuple: making one of those takes longer than all the rest of `merge`.
    token: Token
    source: Source


class TokenLog:
    """Output tokens by position. Whatever the workers send, each position is given out once and in order."""

    def __init__(self, prompt_tokens: int) -> None:
        """The first output token has position `prompt_tokens`."""
        self.prompt_tokens = prompt_tokens
        self.entries: list[Entry] = []
        """Without gaps, from the first output token on."""
        self.conflicts = 0
        """Tokens that came for a position which already had a different one. The first one stays."""
        self._early: dict[int, Entry] = {}

    def __len__(self) -> int:
        """Output tokens known without a gap."""
        return len(self.entries)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(entry.token.id for entry in self.entries)

    def merge(self, tokens: Iterable[Token], source: Source) -> list[Entry]:
        """Enter `tokens`; returns those that now follow the log without a gap, in order.

        A token of a position that is known is dropped; one ahead of a gap is kept until the gap is filled.
        Raises `EngineError` for a position inside the prompt.
        """
        before = len(self.entries)
        for token in tokens:
            index = token.position - self.prompt_tokens
            if index < 0:
                raise EngineError(
                    f"{source} sent a token at position {token.position}",
                    why=f"the prompt has {self.prompt_tokens} tokens, so output begins at that position",
                )
            known = self.entries[index] if index < len(self.entries) else self._early.get(index)
            if known is not None:
                self.conflicts += known.token.id != token.id
            elif index == len(self.entries):
                self.entries.append(Entry(token, source))
                while self._early and (early := self._early.pop(len(self.entries), None)):
                    self.entries.append(early)
            else:
                self._early[index] = Entry(token, source)
        return self.entries[before:]
