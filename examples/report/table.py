"""Tables for people: on a terminal, or as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()

    def markdown(self) -> str:
        lines = [f"**{self.title}**", "", _line(self.columns), _line(["---"] * len(self.columns))]
        lines += [_line(row) for row in self.rows]
        for note in self.notes:
            lines += ["", note]
        return "\n".join(lines)

    def show(self, console: Console) -> None:
        table = RichTable(title=self.title, title_justify="left", title_style="bold")
        for number, column in enumerate(self.columns):
            table.add_column(column, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for note in self.notes:
            console.print(note, highlight=False)
        console.print()


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def off(ours: float, theirs: float) -> str:
    """By how much ours differs, e.g. `+3.1 %`."""
    return f"{ours / theirs - 1:+.1%}".replace("%", " %")
