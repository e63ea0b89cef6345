"""The token ids of a workload's prompts."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from pdd_runtime.planner import Session, Workload


class Prompts:
    """Random tokens, the same for the same seed. No two texts begin alike but where the workload says so."""

    def __init__(self, workload: Workload, seed: int, name: str = "") -> None:
        """`name` as for `Workload.sessions`; shared prefixes are the same for all names."""
        self._first, self._count = workload.first_token, workload.last_token - workload.first_token + 1
        self._seed, self._name, self._recorded = seed, name, workload.trace is not None

    def prefix(self, number: int, length: int) -> list[int]:
        """The beginning of a shared prefix: a longer one goes on where a shorter one ends."""
        return self._draw(f"prefix/{number}", length)

    def prompt(self, session: Session, turn: int, history: Sequence[int]) -> list[int]:
        """The prompt of a session's turn. `history`: the prompt and answer of the turn before; where an error made
        it shorter than planned, the prompt gets as long all the same. A trace's prompts have no history: what they have
        in common is recorded."""
        planned = session.turns[turn]
        if self._recorded:
            return [token for chain, length in planned.spans for token in self._chain(chain, length)]
        shared = list(history[: planned.reused]) if turn else self.prefix(session.prefix, planned.reused)
        missing = planned.prompt - len(shared)
        return shared + self._draw(f"{self._name}/{session.number}/{turn}", missing)

    def _chain(self, chain: int, length: int) -> list[int]:
        return self.prefix(-1 - chain, length) if chain < 0 else self._draw(f"{self._name}/chain/{chain}", length)

    def _draw(self, what: str, length: int) -> list[int]:
        # Bytes of a seeded Random are the same in every version of Python; numpy only makes them quick.
        data = random.Random(f"{self._seed}/tokens/{what}").randbytes(4 * length)
        drawn: list[int] = (np.frombuffer(data, "<u4") % self._count + self._first).tolist()
        return drawn
