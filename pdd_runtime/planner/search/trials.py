"""Trials in waves: what all who search want to know next is simulated at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from pdd_runtime.planner.plan_spec import Effort
from pdd_runtime.planner.search.bounds import Bounds
from pdd_runtime.planner.search.crew import Crew
from pdd_runtime.planner.search.family import Family
from pdd_runtime.planner.search.known import Known
from pdd_runtime.planner.search.point import Candidate
from pdd_runtime.planner.search.trial import Change, Trial, Verdict

T = TypeVar("T")
Steps = Generator[Trial, Verdict, T]
"""Something that asks for one trial after the other."""
Told = Callable[[str, int], None]
"""What is done, and how many trials of it more have ended."""


class Trials:
    """Deterministic: the same plan asks for the same trials in the same order, however many processes do them."""

    def __init__(
        self,
        families: Sequence[Family],
        bounds: Sequence[Bounds],
        effort: Effort,
        crew: Crew,
        told: Told,
        seed: int = 0,
    ) -> None:
        self.families, self.bounds = families, bounds
        self.known = Known()
        self.done = 0
        """How many were simulated."""
        self._effort, self._crew, self._told, self._seed = effort, crew, told, seed
        self._verdicts: dict[Trial, Verdict] = {}

    def trial(
        self,
        candidate: Candidate,
        rate: float,
        changes: tuple[Change, ...] = (),
        *,
        longer: int = 1,
        seed: int | None = None,
    ) -> Trial:
        requests = max(self._effort.requests, round(rate * self._effort.span)) * longer
        seed = self._seed if seed is None else seed
        return Trial(candidate.family, candidate.sizes, rate, requests, seed, changes)

    def verdicts(self, what: str, trials: Sequence[Trial]) -> list[Verdict]:
        """Of each; what has been simulated before is not again."""
        new = [trial for trial in dict.fromkeys(trials) if trial not in self._verdicts]
        self._told(what, 0)
        for trial, verdict in zip(new, self._crew.do(new, lambda: self._told(what, 1)), strict=True):
            self._verdicts[trial] = verdict
            if trial == self.trial(Candidate(trial.family, trial.sizes), trial.rate):
                self.known.learn(trial, verdict)
        self.done += len(new)
        return [self._verdicts[trial] for trial in trials]

    def together(self, what: str, steps: Mapping[Any, Steps[T]]) -> dict[Any, T]:
        """What each comes to. They go in lockstep: each wave does the next trial of each that goes on."""
        came: dict[Any, T] = {}
        waiting: dict[Any, Trial] = {}

        def go(key: Any, verdict: Verdict | None) -> None:
            try:
                waiting[key] = next(steps[key]) if verdict is None else steps[key].send(verdict)
            except StopIteration as end:
                came[key] = end.value

        for key in steps:
            go(key, None)
        while waiting:
            wave, waiting = waiting, {}
            for key, verdict in zip(wave, self.verdicts(what, list(wave.values())), strict=True):
                go(key, verdict)
        return {key: came[key] for key in steps}

    def holds(self, candidate: Candidate, rate: float) -> Steps[Verdict | bool]:
        """Whether it keeps its promise at a rate; the verdict where there is one."""
        trial = self.trial(candidate, rate)
        if trial in self._verdicts:
            return self._verdicts[trial]
        if self.bounds[candidate.family].rate(candidate.sizes) < rate:
            return False
        follows = self.known.keeps(candidate.family, candidate.sizes, rate)
        if follows is not None:
            return follows
        return (yield trial)


def kept(verdict: Verdict | bool) -> bool:
    return verdict if isinstance(verdict, bool) else verdict.kept
