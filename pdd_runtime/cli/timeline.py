"""One request's timeline, drawn for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pdd_runtime.cli.console import plain

WIDTH = 48
"""Characters of the time axis, where there is room."""
_BESIDE = 86
"""Characters of what stands beside it."""
_EARLY = 1.5
"""A longer axis is cut at so many times the end of everything before main decodes."""


@dataclass(frozen=True)
class Row:
    """A bar from `start` to `end`, in seconds from arrival; None: not (yet) there."""

    label: str
    style: str
    start: float | None
    end: float | None
    detail: str


def axis_width(columns: int) -> int:
    """The width of the axis on a terminal of so many columns."""
    return max(16, min(WIDTH, columns - _BESIDE))


def draw(body: Mapping[str, Any], width: int = WIDTH) -> RenderableType:
    """`body` is the answer of `GET /pdd/requests/{id}`."""
    rows = timeline_rows(body)
    whole = max([row.end for row in rows if row.end is not None] + [_end(body), 1e-3])
    # All but main's own decoding is over early in a long answer: that part gets most of the axis.
    early = max([row.end for row in rows[:-1] if row.end is not None] + [rows[-1].start or 0.0])
    span = min(whole, _EARLY * early) if early > 0 else whole
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, min_width=width)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for row in rows:
        time = f"{row.start:.2f}–{row.end:.2f} s" if row.start is not None and row.end is not None else "–"
        table.add_row(Text(row.label, row.style), _bar(row, span, width), Text(time, "dim"), Text(row.detail))
    table.add_row("", Text(_axis(span, width, cut=span < whole), "dim"), "", "")
    head = Text.assemble(
        ("timeline of ", "dim"), plain(str(body["id"])), ("  route ", "dim"), (str(body["route"] or "none"), "bold")
    )
    if body["variant"]:
        head.append("  variant ", "dim").append(plain(body["variant"]), "bold")
    return Group(head, table, *(Text(sentence) for sentence in explain(body)))


def timeline_rows(body: Mapping[str, Any]) -> list[Row]:
    """The bars, in the order in which a request goes through them."""
    tokens, cached = body["tokens"], body["cached"]
    route, events = body["route"], _Events(body["events"])
    rows = []
    if (queued := events.at("queued")) is not None:
        rows.append(Row("queued", "red", queued, events.at("admitted", "cancelled", "error"), "no room"))
    if route != "A":
        prompt = f"{_tokens(body['prompt_tokens'])}, {cached['prefill'] or 0} of them cached"
        rows.append(Row("prefill", "cyan", events.at("prefill starts"), events.at("prefill ends"), prompt))
    for transfer in body["kv"]:
        target = str(transfer["edge"]).partition("->")[2]
        blocks = f"{transfer['blocks_sent']} blocks"
        if transfer["blocks_cached"]:
            blocks += f", {transfer['blocks_cached']} were there"
        rate = f", {_rate(transfer['goodput'])}" if transfer["goodput"] else ""
        detail = f"{_size(transfer['bytes'])}, {blocks}{rate}"
        rows.append(Row(f"KV → {target}", "blue", transfer["started"], transfer["finished"], detail))
    if tokens["relay"] or events.at("relay starts") is not None:
        detail = _tokens(tokens["relay"])
        rows.append(
            Row("relay tokens", "yellow", events.at("relay starts"), events.at("relay stops", last=True), detail)
        )
    handoff = body["handoff"]
    if handoff is not None:
        begun = events.at("extended", "seal", "main starts")
        done = events.at("commit")
        rows.append(Row("handoff", "magenta", begun, done, _handoff(handoff)))
    if route == "P-RLD":
        return rows
    # After a handoff main's bar begins with its first token.
    first = events.at("commit") if handoff is not None else None
    start = first if first is not None else events.at("main starts")
    rows.append(Row("main tokens", "green", start, events.at("main stops", "finish"), _tokens(tokens["main"])))
    return rows


def explain(body: Mapping[str, Any]) -> list[str]:
    """A sentence or two for a newcomer."""
    recovered = [_recovery(recovery) for recovery in body["recoveries"]]
    if body["error"]:
        return [*recovered, f"It failed: {plain(str(body['error']))}"]
    handoff, tokens, route = body["handoff"], body["tokens"], body["route"]
    far = next((transfer for transfer in body["kv"] if not str(transfer["edge"]).endswith("->relay")), None)
    lines = [f"Why this route: {plain(str(body['reason']))}."] if body["reason"] else []
    if handoff is not None and handoff["sealed_at"] is not None and far is not None and far["finished"] is not None:
        seconds = far["finished"] - far["started"]
        gap = f"; the user saw a gap of {handoff['gap'] * 1e3:.0f} ms" if handoff["gap"] is not None else ""
        lines.append(
            f"While {_size(far['bytes'])} of KV crossed to main in {seconds:.2f} s, the relay made "
            f"{_tokens(tokens['relay'])}. Then token IDs, not their KV, went to main, which computed the KV of "
            f"{_tokens(handoff['extended'])}{gap}."
        )
    elif route == "P-RLD":
        lines.append("The relay served it to its end, and its KV never crossed to main.")
    elif route == "P-MD" and far is not None:
        had = body["cached"]["main"] or 0
        lines.append(
            f"Main had the KV of {had} of the prompt's {body['prompt_tokens']} tokens: "
            f"{_size(far['bytes'])} went to it before it could go on."
        )
    return lines + recovered


class _Events:
    """When something happened first, or last."""

    def __init__(self, events: list[Mapping[str, Any]]) -> None:
        self._events = events

    def at(self, *words: str, last: bool = False) -> float | None:
        times = [float(event["t"]) for event in self._events if str(event["what"]).partition(":")[0] in words]
        return (times[-1] if last else times[0]) if times else None


def _recovery(recovery: Mapping[str, Any]) -> str:
    then = f"{plain(str(recovery['to']))} took over" if recovery["to"] else "nobody had to take over"
    return f"At {recovery['t']:.2f} s: {plain(str(recovery['why']))} ({plain(str(recovery['reason']))}); {then}."


def _handoff(handoff: Mapping[str, Any]) -> str:
    if handoff["sealed_at"] is None:
        return f"{handoff['strategy']}: the relay kept it"
    gap = f", gap {handoff['gap'] * 1e3:.0f} ms" if handoff["gap"] is not None else ""
    return f"{handoff['strategy']}: after token {handoff['sealed_at']}, {handoff['extended']} extended{gap}"


def _bar(row: Row, span: float, width: int) -> Text:
    if row.start is None:
        return Text("")
    end = span if row.end is None else row.end
    first = min(int(row.start / span * width), width - 1)
    length = max(1, min(round(end / span * width), width) - first)
    if row.end is None:
        # Still running, or ended by an error.
        return Text(" " * first + "░" * length, row.style)
    return Text(" " * first + "█" * (length - 1) + ("▶" if end > span else "█"), row.style)


def _axis(span: float, width: int, *, cut: bool) -> str:
    end = f"{span:.2f} s" + ("…" if cut else "")
    return "0" + "·" * max(0, width - 1 - len(end)) + end


def _end(body: Mapping[str, Any]) -> float:
    return max((float(event["t"]) for event in body["events"]), default=0.0)


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} GB"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second * 8 / 1e6:.0f} Mbit/s"
