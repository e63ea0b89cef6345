"""What an A/B test knows so far, and whether that is enough."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from pdd_runtime.experiments.outcome import METRICS, Outcome
from pdd_runtime.experiments.paired import Effect, Key, Question, effects
from pdd_runtime.experiments.stopping import Boundary

LOOKS = 5
"""At most, in equal steps of requests."""

Interval = tuple[float, float]
_ANYTHING: Interval = (0.0, inf)
_ANYWHERE: Interval = (-inf, inf)


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
    """Standard errors that an interval reached to either side at the last look, so that those of all looks hold."""
    decided_at: int | None
    """Requests of each graph after which the word stood; None: it is open."""
    ratio_interval: Interval
    """What the intervals of all looks have in common."""
    difference_interval: Interval


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
                before[question] = self._verdict(question, found.get(question), critical, before.get(question))
        return self.decided and self.rules.early

    def _verdict(self, question: Question, effect: Effect | None, critical: float, old: Verdict | None) -> Verdict:
        if effect is None or effect.requests < question.fewest:
            return Verdict(Word.open, effect, critical, None, _ANYTHING, _ANYWHERE)
        ratio, difference = effect.ratio_interval(critical), effect.difference_interval(critical)
        if old is not None:
            # All intervals hold at once, so the truth lies in each of them.
            ratio, difference = _both(old.ratio_interval, ratio), _both(old.difference_interval, difference)
        if old is not None and old.decided_at is not None:
            return Verdict(old.word, effect, critical, old.decided_at, ratio, difference)
        word = self._word(effect.ratio, ratio)
        return Verdict(word, effect, critical, None if word is Word.open else self.asked, ratio, difference)

    def _word(self, ratio: float, interval: Interval) -> Word:
        low, high = interval
        matters = 1 + self.rules.minimum_effect
        if low >= 1 / matters and high <= matters:
            return Word.same
        if high < 1 and ratio <= 1 / matters:
            return Word.better
        return Word.worse if low > 1 and ratio >= matters else Word.open


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


def _both(old: Interval, new: Interval) -> Interval:
    """What two intervals have in common; the newer, where that is nothing."""
    low, high = max(old[0], new[0]), min(old[1], new[1])
    return (low, high) if low <= high else new
