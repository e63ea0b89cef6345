"""What the checks of a whole graph look at."""

from __future__ import annotations

from pdd_runtime.errors import GraphError
from pdd_runtime.graph.document import Document, Route
from pdd_runtime.graph.models import Graph


class Scene:
    """A graph whose names are right, and the file that it stands in."""

    def __init__(self, graph: Graph, document: Document) -> None:
        self.graph, self.spec, self.document = graph, graph.spec, document

    def cluster(self, pool: str) -> str:
        return self.spec.pools[pool].cluster

    def role(self, pool: str) -> str:
        return self.spec.pools[pool].role

    def fed(self, carries: str, source: str, target: str) -> bool:
        return any((e.carries, e.source, e.target) == (carries, source, target) for e in self.spec.edges)

    def error(self, route: Route, what: str, *, why: str = "", fix: str = "") -> GraphError:
        return GraphError(what, where=self.document.locate(route), why=why, fix=fix)
