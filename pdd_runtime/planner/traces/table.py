"""Recordings as CSV with a header."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from pdd_runtime.planner.traces.lines import lines, wrong
from pdd_runtime.planner.workload_error import WorkloadError


def rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each row's place, and its cells under these headings. Raises `WorkloadError`."""
    table = csv.reader(line.decode("utf-8-sig", "replace") for line in lines(path))
    try:
        heading = [cell.strip() for cell in next(table, [])]
        missing = [column for column in columns if column not in heading]
        if missing:
            raise wrong(f"{path}:1", f"it has no column {', '.join(missing)}", _form(columns))
        places = [heading.index(column) for column in columns]
        for row in table:
            where = f"{path}:{table.line_num}"
            if row and len(row) <= max(places):
                raise wrong(where, f"it has {len(row)} cells", _form(columns))
            if row:
                yield where, [row[place] for place in places]
    except csv.Error as error:
        raise wrong(f"{path}:{table.line_num}", str(error), _form(columns)) from error


def wrong_row(where: str, error: Exception, columns: Sequence[str]) -> WorkloadError:
    return wrong(where, str(error), _form(columns))


def _form(columns: Sequence[str]) -> str:
    return f"CSV with the columns {', '.join(columns)}"
