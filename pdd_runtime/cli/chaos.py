"""`pdd-runtime chaos`."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import typer
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pdd_runtime.cli.console import FAILED, OK, Consoles, plain
from pdd_runtime.cli.find import find, is_file
from pdd_runtime.cli.front import front_of
from pdd_runtime.cli.live import LiveStatus
from pdd_runtime.cli.validate import load_checked
from pdd_runtime.clock import now
from pdd_runtime.errors import ConnectionLost, LaunchError
from pdd_runtime.experiments.chaos import Chaos, ChaosPlan, patiently
from pdd_runtime.experiments.chaos_report import ChaosReport
from pdd_runtime.experiments.storm import Stream
from pdd_runtime.launch import AlreadyRunningError, GraphState, Part, down, start_detached, watch
from pdd_runtime.planner import read_workload
from pdd_runtime.testing.etcd_server import EtcdServer
from pdd_runtime.testing.faults import Fault, FaultError, Faults, RunningGraph

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|min|h|)")
_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_INTERRUPTED = 130
_SHOWN = 20
"""Streams that failed, of which a table tells."""


@dataclass(frozen=True)
class ChaosOptions:
    """What `chaos` was asked for."""

    graph: str
    plan: ChaosPlan
    workload: str
    overrides: Sequence[str]
    wait_timeout: float | None
    strike_running: bool
    keep: bool
    as_json: bool


def duration(text: str) -> float:
    """Seconds of `20s`, `10m`, `1h`; a mere number is seconds. Raises `typer.BadParameter`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"{text!r} is no duration: write it as 20s, 10m or 1h")
    return float(match[1]) * _SECONDS[match[2]]


def run_chaos(options: ChaosOptions, consoles: Consoles) -> int:
    """Returns the exit code: 0 where all is well, 1 where the verdict says no, 130 where it was broken off before there
    was anything to judge."""
    # What this process itself sees of discovery's troubles belongs in no table.
    logging.getLogger("pdd_runtime").addHandler(logging.NullHandler())
    try:
        made = asyncio.run(_run(options, consoles))
    except (KeyboardInterrupt, asyncio.CancelledError):
        consoles.err.print("broken off: nothing is judged", style="yellow")
        return _INTERRUPTED
    if options.as_json:
        consoles.json(made.model_dump(mode="json"))
    else:
        consoles.out.print(verdict(made))
    return OK if made.ok else FAILED


async def _run(options: ChaosOptions, consoles: Consoles) -> ChaosReport:
    workload = read_workload(options.workload)
    async with AsyncExitStack() as stack:
        state, etcd = await _graph(stack, options, consoles)
        running = await stack.enter_async_context(RunningGraph(state))
        front = await patiently(lambda: front_of(state))
        chaos = Chaos(running, front, Faults(running, etcd), workload, options.plan)
        screen = stack.enter_context(Screen(consoles.err))
        with _interrupted(chaos, screen):
            return await chaos.run(screen)


async def _graph(
    stack: AsyncExitStack, options: ChaosOptions, consoles: Consoles
) -> tuple[GraphState, EtcdServer | None]:
    """The graph, up; one that was started here is down again at the end."""
    name = options.graph
    if not is_file(name) or find(name).running():
        state = find(name)
        _consent(state, options)
        return state, None
    overrides, etcd = list(options.overrides), None
    if "etcd" in options.plan.kinds:
        etcd = await stack.enter_async_context(_etcd())
        overrides += ["spec.discovery.plugin=etcd", f"spec.discovery.config.endpoints=[{etcd.endpoint}]"]
    loaded, _ = load_checked(Path(name), overrides, consoles)
    state = GraphState(loaded.graph.name)
    detached = await start_detached(loaded.graph, str(loaded.path), state, Part())
    if not options.keep:
        stack.push_async_callback(_down, state)
    try:
        async with asyncio.timeout(options.wait_timeout):
            with LiveStatus(consoles.err) as live:
                if await live.until_ready(watch(state)) is None:
                    raise LaunchError(f"graph {state.name} was stopped while it started")
    except TimeoutError:
        raise LaunchError(
            f"graph {state.name} is not ready after {options.wait_timeout:g} s", fix="--wait-timeout gives it longer"
        ) from None
    except (ConnectionLost, LaunchError):
        raise await detached.failure() from None
    return state, etcd


def _consent(state: GraphState, options: ChaosOptions) -> None:
    if not options.strike_running:
        raise AlreadyRunningError(
            f"graph {state.name} is running already, and its users would feel every fault",
            why="only what this command starts itself is struck without being asked",
            fix=f"stop it with `pdd-runtime down {state.name}`; where it is to be struck as it runs: --strike-running",
        )
    if "etcd" in options.plan.kinds:
        raise FaultError(
            "the etcd of a graph that runs is not struck", why="others may need it", fix="let chaos start the graph"
        )


async def _down(state: GraphState) -> None:
    await down(state, patience=0.0)


@asynccontextmanager
async def _etcd() -> AsyncIterator[EtcdServer]:
    with TemporaryDirectory(prefix="pdd-chaos-", ignore_cleanup_errors=True) as directory:
        server = EtcdServer(Path(directory))
        await server.up()
        try:
            yield server
        finally:
            await server.down()


class _interrupted:  # noqa: N801 - used as a context manager, as contextlib's are
    """The first Ctrl-C ends the faults and lets the streams end; the second breaks off."""

    def __init__(self, chaos: Chaos, screen: Screen) -> None:
        self._chaos, self._screen = chaos, screen

    def __enter__(self) -> None:
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._take)

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.remove_signal_handler(number)

    def _take(self) -> None:
        if self._screen.rages and not self._chaos.stop.is_set():
            self._screen.phase("stopping: what runs may end; Ctrl-C again breaks off")
            self._chaos.stop.set()
        elif self._task is not None:
            self._task.cancel()


class Screen:
    """A bar on a terminal; elsewhere a line for each phase, each fault and each stream that is not as it should be."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[told]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, told="")
        self._begun, self._span = 0.0, 0.0
        self._ended = self._wrong = self._faults = 0

    @property
    def rages(self) -> bool:
        """Faults have begun."""
        return self._span > 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def phase(self, what: str) -> None:
        self._progress.update(self._task, description=what)
        if not self._console.is_terminal:
            self._console.print(what, markup=False)

    def raging(self, span: float) -> None:
        self._begun, self._span = now(), span
        self._progress.update(self._task, total=span)
        self.phase("making faults")

    def ended(self, stream: Stream, same: bool) -> None:
        self._ended += 1
        if not same or stream.outcome.error is not None:
            self._wrong += 1
            why = stream.outcome.error or "other tokens than undisturbed"
            self._console.print(plain(f"{self._at()} {stream.outcome.request_id}: {why}"), style="red", markup=False)
        self._show()

    def making(self, fault: Fault) -> None:
        self._faults += 1
        self._console.print(f"{self._at()} {fault}", markup=False)
        self._show()

    def _at(self) -> str:
        return f"{now() - self._begun:7.1f} s"

    def _show(self) -> None:
        told = f"{self._faults} faults, {self._ended} streams, {self._wrong} of them wrong"
        self._progress.update(self._task, completed=min(now() - self._begun, self._span), told=told)


def verdict(made: ChaosReport) -> RenderableType:
    """What was done, what came of it, and the verdict."""
    parts: list[RenderableType] = [_faults(made), Text(), _facts(made)]
    if made.failed:
        parts += [Text(), _failed(made)]
    parts.append(Text())
    parts.append(Text("well", "bold green") if made.ok else Text("not well", "bold red"))
    parts += [Text(f"  {plain(reason)}") for reason in made.reasons]
    return Group(*parts)


def _faults(made: ChaosReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("AT", "FAULT", "TARGET", "LASTS", "TOUCHED", "REQUESTS"):
        table.add_column(column, justify="right" if column in ("AT", "LASTS", "TOUCHED") else "left")
    for fault in made.faults:
        missed = fault.error or ("nobody was there" if fault.kind in ("kill", "hang") and not fault.struck else "")
        names = plain(missed) or " ".join(fault.touched[:2]) + (" …" if len(fault.touched) > 2 else "")
        lasts = f"{fault.seconds:g} s" if fault.seconds else ""
        table.add_row(f"{fault.at:.1f} s", fault.kind, fault.target, lasts, str(len(fault.touched)), Text(names))
    return table


def _facts(made: ChaosReport) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    gaps = made.gaps
    rows = {
        "streams": f"{made.streams} in {made.seconds:.0f} s, {made.touched} touched, {made.recovered} recovered",
        "tokens": f"{made.same} streams the same as undisturbed, {made.changed} changed; {made.tokens} tokens compared",
        "errors": str(made.errors),
        "longest gap": f"{gaps.longest:.2f} s, p99 {gaps.p99:.2f} s; undisturbed {gaps.undisturbed:.2f} s",
        "first token": f"after {made.first_token:.2f} s at most; {made.refused} refusals (429, 503) asked again",
        "left behind": "; ".join(made.leaks) or "nothing",
        "restarts": ", ".join(f"{name} {count}" for name, count in made.restarts.items()) or "none",
        "all ready again": "no" if made.back is None else f"{made.back:.1f} s after the last fault",
        "memory": ", ".join(f"{name} {_mega(was)} → {_mega(is_)}" for name, (was, is_) in made.memory.items()) or "–",
    }
    if made.unsteady:
        rows["not compared"] = f"{made.unsteady} requests, which differ between two undisturbed runs"
    for name, value in rows.items():
        table.add_row(name, Text(plain(value)))
    return table


def _failed(made: ChaosReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("AT", "REQUEST", "TOKEN", "WHY"):
        table.add_column(column, justify="right" if column in ("AT", "TOKEN") else "left")
    for one in made.failed[:_SHOWN]:
        table.add_row(f"{one.at:.1f} s", one.id, str(one.position), Text(plain(one.why).partition("\n")[0]))
    return table


def _mega(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
