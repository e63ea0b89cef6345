"""How measurements go on, on a terminal and elsewhere."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pdd_runtime.experiments import Outcome
from pdd_runtime.launch import GraphStatus


class Bars:
    """A bar for each graph on a terminal; elsewhere a line when one begins and when it has ended."""

    def __init__(self, console: Console, requests: int) -> None:
        self._console, self._requests = console, requests
        self._progress = Progress(
            TextColumn("{task.fields[name]:<16}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: dict[str, TaskID] = {}
        self._errors: dict[str, int] = {}
        self._ended: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def starting(self, name: str, status: GraphStatus) -> None:
        ready = sum(process.state == "ready" for process in status.processes)
        self._say(name, f"starts: {ready} of {len(status.processes)} processes are ready")

    def warming(self, name: str) -> None:
        self._say(name, "warms up")

    def ended(self, name: str, outcome: Outcome) -> None:
        self._ended[name] = self._ended.get(name, 0) + 1
        self._errors[name] = self._errors.get(name, 0) + (outcome.error is not None)
        errors = f"{self._errors[name]} errors" if self._errors[name] else ""
        self._say(name, errors)
        self._progress.update(self._task[name], completed=self._ended[name])
        if not self._console.is_terminal and self._ended[name] == self._requests:
            self._console.out(f"{name}: {self._requests} requests, {errors or 'no errors'}", highlight=False)

    def tell(self, text: str) -> None:
        """A line of its own, above the bars."""
        self._progress.console.print(text, highlight=False, markup=False)

    def _say(self, name: str, text: str) -> None:
        if name not in self._task:
            self._task[name] = self._progress.add_task(text, total=self._requests, name=name)
            if not self._console.is_terminal:
                self._console.out(f"{name}: begins", highlight=False)
        self._progress.update(self._task[name], description=text)
