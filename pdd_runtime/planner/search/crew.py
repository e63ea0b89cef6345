"""Processes that do trials. They end with whoever started them, however that ends."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from pdd_runtime.errors import PddError
from pdd_runtime.planner.search.trial import Trial, Verdict

Work = Callable[[Trial], Verdict]


class Crew(Protocol):
    """Whoever does trials."""

    def do(self, trials: Sequence[Trial], done: Callable[[], None]) -> list[Verdict]:
        """Their verdicts in the same order, whoever did which; `done` is called after each. Raises what a trial
        raises."""
        ...


class Alone:
    """In this process."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def do(self, trials: Sequence[Trial], done: Callable[[], None]) -> list[Verdict]:
        verdicts = []
        for trial in trials:
            verdicts.append(self._work(trial))
            done()
        return verdicts


class Processes:
    """Several. Each makes the function that does a trial for itself."""

    def __init__(self, lines: Sequence[Connection]) -> None:
        self._lines = lines

    def do(self, trials: Sequence[Trial], done: Callable[[], None]) -> list[Verdict]:
        verdicts: dict[int, Verdict] = {}
        at: dict[Any, int] = {}
        left = iter(range(len(trials)))

        def give(line: Connection) -> None:
            number = next(left, None)
            if number is not None:
                line.send(trials[number])
                at[line] = number

        try:
            for line in self._lines:
                give(line)
            while at:
                for ready in wait(list(at)):
                    free: Any = ready
                    number = at.pop(free)
                    answer, wrong = free.recv()
                    if wrong is not None:
                        raise PddError.from_wire(wrong) if isinstance(wrong, dict) else wrong
                    verdicts[number] = answer
                    done()
                    give(free)
        except (EOFError, ConnectionError) as error:
            raise PddError(
                "a process of the search has ended",
                why="it was killed, perhaps for want of memory",
                fix="search with --processes 1",
            ) from error
        return [verdicts[number] for number in range(len(trials))]


@contextmanager
def crew(processes: int, prepare: Callable[..., Work], *arguments: Any) -> Iterator[Crew]:
    """So many processes, each with `prepare(*arguments)`, a module's own function; with one it is this one."""
    if processes == 1:
        yield Alone(prepare(*arguments))
        return
    context = multiprocessing.get_context("spawn")
    lines: list[Connection] = []
    started: list[BaseProcess] = []
    try:
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process: BaseProcess = context.Process(target=_serve, args=(theirs, prepare, arguments), daemon=True)
            process.start()
            theirs.close()
            lines.append(ours)
            started.append(process)
        yield Processes(lines)
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.join()
        for line in lines:
            line.close()


def _serve(line: Connection, prepare: Callable[..., Work], arguments: tuple[Any, ...]) -> None:
    # Ctrl-C reaches all processes of a terminal; the one that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    work: Work | None = None
    while True:
        try:
            trial = line.recv()
        except EOFError:
            return
        answer: tuple[Any, dict[str, str] | Exception | None]
        try:
            work = work or prepare(*arguments)
            answer = (work(trial), None)
        except PddError as error:
            answer = (None, error.to_wire())
        except Exception as error:
            answer = (None, error)
        try:
            line.send(answer)
        except BrokenPipeError:
            return
