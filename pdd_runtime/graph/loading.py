"""From a YAML file to a checked graph."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from pdd_runtime.errors import GraphError
from pdd_runtime.graph import document as documents
from pdd_runtime.graph import overrides as changes
from pdd_runtime.graph.checks import check
from pdd_runtime.graph.document import Document, Route
from pdd_runtime.graph.faults import explain_all, raise_all
from pdd_runtime.graph.models import Graph


@dataclass(frozen=True)
class LoadedGraph:
    """A graph that is whole and right, and the file it came from."""

    graph: Graph
    path: Path
    document: Document

    def locate(self, route: Route) -> str:
        """`file:line:column` of a value, e.g. of `("spec", "pools", "main", "engine")`, for a message about it."""
        return self.document.locate(route)

    def to_json(self) -> str:
        """The graph as workers get it: overrides and defaults written out. `Graph.model_validate_json` reads it."""
        return self.graph.model_dump_json(by_alias=True, indent=1)


def load(path: str | Path, overrides: Sequence[str] = ()) -> LoadedGraph:
    """Read, change (`--set`), validate and check. Raises `GraphError`, with file:line:column, and `GraphErrors`
    where there are several faults."""
    path = Path(path)
    return _loaded(documents.read(path), path, overrides)


def loads(text: str, overrides: Sequence[str] = (), name: str = "graph.yaml") -> LoadedGraph:
    """The same from a text; `name` stands for the file in messages."""
    return _loaded(documents.parse(text, name), Path(name), overrides)


def _loaded(document: Document, path: Path, overrides: Sequence[str]) -> LoadedGraph:
    for override in overrides:
        changes.apply(document, override)
    try:
        # By way of JSON, where strictness knows lists only: a list is a tuple, but "2" is no number.
        graph = Graph.model_validate_json(json.dumps(document.data), strict=True)
    except ValidationError as error:
        raise_all(in_order(explain_all(error.errors(include_url=False), Graph, document)))
        raise
    raise_all(in_order(check(graph, document)))
    return LoadedGraph(graph.beside(path.parent), path, document)


def in_order(errors: Sequence[GraphError]) -> list[GraphError]:
    """As they stand in the file; those of `--set` last."""

    def place(error: GraphError) -> tuple[int, int]:
        line, _, column = error.where.rpartition(":")[0].rpartition(":")[2], "", error.where.rpartition(":")[2]
        return (int(line), int(column)) if line.isdecimal() and column.isdecimal() else (1 << 30, 0)

    return sorted(errors, key=place)
