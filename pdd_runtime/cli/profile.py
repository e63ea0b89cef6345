"""`pdd-runtime profile`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as Rows
from rich.text import Text

from pdd_runtime.cli.console import OK, Consoles
from pdd_runtime.cli.find import find, is_file
from pdd_runtime.cli.front import front_of
from pdd_runtime.cli.interrupt import run
from pdd_runtime.cli.targets import OWN_FRONTEND
from pdd_runtime.cli.validate import load_checked
from pdd_runtime.errors import PddError
from pdd_runtime.experiments.html import seconds, size
from pdd_runtime.experiments.pool_times import Extent
from pdd_runtime.experiments.profile import Profiling
from pdd_runtime.experiments.running import running
from pdd_runtime.graph.units import write_bandwidth
from pdd_runtime.launch import GraphState, GraphStatus
from pdd_runtime.planner.pool_model import pool_model
from pdd_runtime.planner.profile import Profile
from pdd_runtime.plugins import load_plugins
from pdd_runtime.testing.running_graph import RunningGraph

_BUSY = 0.5
"""Of each CPU: above it something else is in the numbers."""


@dataclass(frozen=True)
class ProfileOptions:
    """What `profile` was asked for."""

    graph: str
    out: Path | None
    extent: Extent
    seed: int
    overrides: Sequence[str]
    wait_timeout: float | None
    as_json: bool


def run_profile(options: ProfileOptions, consoles: Consoles) -> int:
    """Measure, write the profile, print what it says. Returns the exit code."""
    if options.out is not None:
        # Before the measurement, not behind it.
        _write(options.out, "")
    load, cpus = os.getloadavg()[0], os.cpu_count() or 1
    if load > _BUSY * cpus:
        word = (
            f"this computer is busy ({load:.1f} at once on {cpus} CPUs): what is measured here is as slow as it is now"
        )
        consoles.err.print(word, style="yellow")
    made = run(_run(options, consoles))
    out = options.out or Path(f"{made.graph}.profile.yaml")
    _write(out, made.to_yaml())
    if options.as_json:
        consoles.json(made.model_dump(mode="json", exclude_none=True))
    else:
        consoles.out.print(_pools(made))
        if made.links:
            consoles.out.print()
            consoles.out.print(_links(made))
    consoles.err.print(f"written to {out}", markup=False)
    return OK


async def _run(options: ProfileOptions, consoles: Consoles) -> Profile:
    async with AsyncExitStack() as stack:
        told = stack.enter_context(Told(consoles.err))
        profiling = await stack.enter_async_context(_graph(options, consoles, told))
        return await profiling.run()


@asynccontextmanager
async def _graph(options: ProfileOptions, consoles: Consoles, told: Told) -> AsyncIterator[Profiling]:
    """The graph, up; one that was started here is down again at the end."""
    name = options.graph
    if not is_file(name):
        if options.overrides:
            raise PddError(
                f"graph {name} runs, and is measured as it is",
                why="--set is given",
                fix="name the graph's file instead",
            )
        state = find(name)
        async with RunningGraph(state) as graph:
            front = await front_of(state)
            yield Profiling(graph, front.url, options.extent, told, front, options.seed)
        return
    loaded, _ = load_checked(Path(name), [*options.overrides, *OWN_FRONTEND], consoles)
    with TemporaryDirectory(prefix="pdd-profile-", ignore_cleanup_errors=True) as directory:
        base = Path(directory)
        up = running(loaded.graph, name, load_plugins(), base, told.status, options.wait_timeout)
        async with up as url, RunningGraph(GraphState(loaded.graph.name, base)) as graph:
            yield Profiling(graph, url, options.extent, told, None, options.seed)


class Told:
    """What is measured now: a line that changes on a terminal, elsewhere a line when another pool or link begins."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
        )
        self._task = self._progress.add_task("starts")
        self._last = ""

    def __enter__(self) -> Told:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, subject: str, what: str) -> None:
        self._progress.update(self._task, description=f"{subject}: {what}")
        if not self._console.is_terminal and subject != self._last:
            self._console.out(f"{subject}: begins", highlight=False)
        self._last = subject

    def status(self, status: GraphStatus) -> None:
        ready = sum(process.state == "ready" for process in status.processes)
        self._progress.update(self._task, description=f"starts: {ready} of {len(status.processes)} are ready")


def _pools(made: Profile) -> Rows:
    """What the simulator will believe."""
    plugins = load_plugins()
    models = {name: pool_model(said, plugins, f"pool {name}") for name, said in made.pools.items()}
    table = _table("", *models)

    def row(title: str, cell: Callable[[str], str]) -> None:
        table.add_row(Text(title, "dim"), *(cell(name) for name in models))

    row("1,000 tokens of a prompt", lambda name: seconds(models[name].prompt(1000, 0)))
    row("… 100 behind 900 known", lambda name: seconds(models[name].prompt(100, 900)))
    row("a step of 1 at 1,000", lambda name: seconds(models[name].latency.decode(1, 1000)))
    row("a step of a full batch", lambda name: seconds(models[name].latency.decode(models[name].batch_limit, 1000)))
    row("batch", lambda name: str(models[name].batch_limit))
    row("chunk", lambda name: str(models[name].chunk))
    row("capacity", lambda name: f"{models[name].capacity:,}")
    row("KV, 1,000 tokens", lambda name: size(round(models[name].kv_bytes(1000))))
    row("overhead", lambda name: seconds(models[name].overhead))
    return table


def _links(made: Profile) -> Rows:
    table = _table("LINK", "RTT", "GOODPUT")
    for name, link in made.links.items():
        goodput = "–" if link.goodput is None else write_bandwidth(float(f"{link.goodput:.3g}"))
        table.add_row(name, seconds(link.rtt), goodput)
    return table


def _table(*columns: str) -> Rows:
    table = Rows(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PddError("the profile cannot be written", where=str(path), why=error.strerror or str(error)) from error
