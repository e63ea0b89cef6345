"""`pdd-runtime ab status`, `promote`, `abort` and `resume`: the variants of a running graph."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pdd_runtime.cli.ask import get, post
from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.find import find
from pdd_runtime.cli.front import front_of
from pdd_runtime.errors import RequestError
from pdd_runtime.launch import GraphState

_PATH = "/pdd/variants"
_TIMES = (("ttft", "p50"), ("ttft", "p90"), ("tpot", "p50"), ("tpot", "p90"), ("gap", "p90"))
_COMPARED = {
    "ttft_p90": "TTFT P90",
    "tpot_p90": "TPOT P90",
    "gap_p90": "longest gap P90",
    "e2e_p90": "whole answer P90",
}
_STATES = {"running": "", "promote": "promoted", "abort": "aborted", "rollback": "rolled back"}
_SHOWN = 5
"""Decisions that are printed."""


def status(graph: str | None, as_json: bool, consoles: Consoles) -> None:
    """Raises `RequestError` where the graph has no variants."""
    _show(asyncio.run(_asked(find(graph), None)), as_json, consoles)


def decide(do: str, variant: str | None, why: str, graph: str | None, as_json: bool, consoles: Consoles) -> None:
    """`promote`, `abort` or `resume`. Raises `RequestError` for what makes no sense."""
    state = find(graph)
    body = asyncio.run(_asked(state, {"do": do, "variant": variant, "why": why}))
    _show(body, as_json, consoles)
    if not as_json:
        consoles.err.print(
            "This holds over restarts, until the graph's file says something else of it. To make it last, write the "
            "weights there and apply it with `up -d`.",
            markup=False,
        )


async def _asked(state: GraphState, order: Mapping[str, Any] | None) -> dict[str, Any]:
    graph = state.read_graph()
    if graph is not None and not graph.spec.variants:
        raise RequestError(
            f"graph {graph.name} has no variants",
            where="spec.variants",
            why="all its requests are served in one way, so there is nothing to compare",
            fix="declare some, and apply the file with `up -d`; `pdd-runtime ab A.yaml B.yaml` compares two graphs",
        )
    async with (await front_of(state)).client(admin=True) as http:
        body: dict[str, Any] = (await (get(http, _PATH) if order is None else post(http, _PATH, order))).json()
    return body


def _show(body: dict[str, Any], as_json: bool, consoles: Consoles) -> None:
    if as_json:
        consoles.json(body)
        return
    consoles.out.print(_table(body))
    _lines(body, consoles.out)


def _table(body: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("variant")
    table.add_column("")
    for name in ("share", "requests", "failed", "TTFT P50", "P90", "TPOT P50", "P90", "longest gap P90"):
        table.add_column(name, justify="right")
    for each in body["variants"]:
        role = "control" if each["name"] == body["control"] else ""
        table.add_row(
            *(each["name"], ", ".join(filter(None, (role, _STATES[each["state"]])))),
            *(f"{each['share']:.1%}", str(each["requests"]), str(each["failed"])),
            *(_time(each[time][quantile]) for time, quantile in _TIMES),
        )
    return table


def _lines(body: Mapping[str, Any], console: Console) -> None:
    for each in body["variants"]:
        if each["against_control"] is not None:
            console.print(Text.assemble((f"\n{each['name']} against {body['control']}", "bold")))
            for line in _compared(each["against_control"]):
                console.print(f"  {line}", markup=False)
        if each["why"]:
            console.print(f"  {each['why']}", markup=False)
        if each["elsewhere"]:
            console.print(
                f"  {each['elsewhere']} of its requests were served by others, for it could not", markup=False
            )
    for note in body["notes"]:
        console.print(f"\nnote: {note}", style="yellow", markup=False)
    if body["decisions"]:
        console.print(Text("\ndecided", "bold"))
        for decision in body["decisions"][-_SHOWN:]:
            console.print(f"  {decision['variant']} {decision['told']}", markup=False)


def _compared(against: Mapping[str, list[float] | None]) -> Iterator[str]:
    """Intervals at 99 %."""
    if (failed := against["failed"]) is not None:
        low, middle, high = failed
        yield f"failed: {middle:+.1%} of requests ({low:+.1%} … {high:+.1%}): {_verdict(low, high)}"
    for key, name in _COMPARED.items():
        if (ratio := against[key]) is not None:
            low, middle, high = (bound - 1 for bound in ratio)
            yield f"{name}: {middle:+.0%} ({low:+.0%} … {high:+.0%}): {_verdict(low, high)}"
        else:
            yield f"{name}: too early to say"


def _verdict(low: float, high: float) -> str:
    return "worse" if low > 0 else "better" if high < 0 else "no difference shown"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
