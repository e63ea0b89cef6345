"""A workload in which less was seen before."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from pdd_runtime.planner.content import extended, leading
from pdd_runtime.planner.session import Session, Turn
from pdd_runtime.planner.workload import Workload

_OWN = 1 << 61
"""Where chains of what is said otherwise begin."""
_TURNS = 1 << 20


class FewerHits(Workload):
    """The same requests at the same times, but each has in common with earlier ones only a share of what it had. In
    traces, whose requests continue each other across sessions, it may be less."""

    keep: float = 1.0
    """Of each request's reused tokens, this share."""

    @staticmethod
    def of(workload: Workload, keep: float) -> FewerHits:
        """Raises `ValueError` unless `keep` is between 0 and 1."""
        if not 0 <= keep <= 1:
            raise ValueError("of what was reused, a share between 0 and 1 can be kept")
        fields = {name: getattr(workload, name) for name in type(workload).model_fields}
        return FewerHits.model_construct(**fields, keep=keep)

    def stream(self, seed: int, name: str = "") -> Iterator[Session]:
        for session in super().stream(seed, name):
            yield replace(session, turns=tuple(self._turns(session)))

    def _turns(self, session: Session) -> Iterator[Turn]:
        known = session.turns[0].spans
        for number, turn in enumerate(session.turns):
            reused = round(turn.reused * self.keep)
            lost = turn.reused - reused
            if number == 0 and not lost:
                spans = turn.spans
            else:
                own = (_OWN + session.number * _TURNS + number, turn.prompt - reused)
                spans = (*leading(known, reused), own)
            known = extended(spans, turn.output)
            yield replace(turn, reused=reused, fresh=turn.fresh + lost, spans=spans)
