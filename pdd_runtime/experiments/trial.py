"""What an A/B test knows so far, and whether that is enough."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pdd_runtime.experiments.outcome import METRICS, Outcome
from pdd_runtime.experiments.paired import Effect, Key, Question, effects
from pdd_runtime.experiments.stopping import Boundary

LOOKS = 5
"""At most, in equal steps of requests."""


class Word(StrEnum):
    """How a graph compares with the first in one question."""

    better = "better"
    worse = "worse"
    same = "same"
    """No difference that would matter."""
    open = "no difference shown"


@dataclass(frozen=True)
class Rules:
    """When a difference is one."""

    questions: Sequence[Question]
    minimum_effect: float = 0.03
    """Smaller ones do not matter, as a share: 0.03 is 3 %."""
    error: float = 0.05
    """The chance that any verdict of a test is wrong, over all questions, graphs and looks."""
    early: bool = True
    """Stop when every question has a verdict."""


@dataclass(frozen=True)
class Verdict:
    """The answer to one question about one graph."""

    word: Word
    effect: Effect | None
    """None: no request has the metric at both graphs."""
    critical: float
    """Standard errors that the intervals reach to either side, so that those of all looks hold at once."""
    decided_at: int | None
    """Requests of each graph after which the word stood; None: it is open."""


class Trial:
    """Takes outcomes, block by block, of each graph; answers as rules say."""

    def __init__(self, names: Sequence[str], rules: Rules, requests: int) -> None:
        """`names`: of the graphs; the others are compared with the first. `requests`: how many each may get."""
        self.names, self.rules, self.requests = tuple(names), rules, requests
        self.outcomes: dict[str, list[Outcome]] = {name: [] for name in names}
        self.blocks: dict[Key, int] = {}
        """Which block a request was in."""
        self.verdicts: dict[str, dict[Question, Verdict]] = {name: {} for name in self.names[1:]}
        self.looks: list[int] = []
        """Requests of each graph at every look so far."""
        self._boundary = Boundary(rules.error / (len(rules.questions) * (len(names) - 1)))

    def add(self, block: int, outcomes: Mapping[str, Iterable[Outcome]]) -> None:
        """A block that every graph was asked."""
        for name, some in outcomes.items():
            for outcome in some:
                self.outcomes[name].append(outcome)
                self.blocks[outcome.key] = block

    @property
    def asked(self) -> int:
        """Requests of each graph."""
        return len(self.blocks)

    @property
    def due(self) -> bool:
        """Whether it is time to look again."""
        return self.asked >= self.requests * (len(self.looks) + 1) / LOOKS and self.asked < self.requests

    @property
    def decided(self) -> bool:
        """Every question has its verdict."""
        return bool(self.looks) and all(
            verdict.word is not Word.open for verdicts in self.verdicts.values() for verdict in verdicts.values()
        )

    def look(self) -> bool:
        """Answer with what is there. Returns whether it is time to stop."""
        if self.looks and self.asked == self.looks[-1]:
            return self.decided and self.rules.early
        critical = self._boundary.look(min(1.0, self.asked / self.requests))
        self.looks.append(self.asked)
        base = _values(self.outcomes[self.names[0]])
        for name, before in self.verdicts.items():
            found = effects(base, _values(self.outcomes[name]), self.blocks, self.rules.questions)
            for question in self.rules.questions:
                word = self._word(question, found.get(question), critical)
                old = before.get(question)
                # All intervals hold at once, so what one of them has shown stands.
                if old is not None and old.decided_at is not None:
                    before[question] = Verdict(old.word, found.get(question), critical, old.decided_at)
                else:
                    at = None if word is Word.open else self.asked
                    before[question] = Verdict(word, found.get(question), critical, at)
        return self.decided and self.rules.early

    def _word(self, question: Question, effect: Effect | None, critical: float) -> Word:
        if effect is None or effect.requests < question.fewest:
            return Word.open
        low, high = effect.ratio_interval(critical)
        matters = 1 + self.rules.minimum_effect
        if high < 1 / matters:
            return Word.better
        if low > matters:
            return Word.worse
        return Word.same if low >= 1 / matters and high <= matters else Word.open


def verdict_of(verdicts: Iterable[Verdict]) -> Word | None:
    """Of all questions about one graph in a word; None: better in some, worse in others."""
    words = {verdict.word for verdict in verdicts}
    if {Word.better, Word.worse} <= words:
        return None
    for word in (Word.better, Word.worse):
        if word in words:
            return word
    return Word.same if words == {Word.same} else Word.open


def _values(outcomes: Sequence[Outcome]) -> dict[str, dict[Key, float]]:
    found: dict[str, dict[Key, float]] = {metric: {} for metric in METRICS}
    for outcome in outcomes:
        for metric in METRICS:
            if (value := outcome.metric(metric)) is not None:
                found[metric][outcome.key] = value
    return found
