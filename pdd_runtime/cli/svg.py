"""A graph as an SVG: clusters side by side, links as bands between them, pools and the edges that join them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from xml.etree import ElementTree as ET

from pdd_runtime.cli import wording
from pdd_runtime.graph import Edge, Graph, Link, link_between

_INK, _SOFT, _LINE = "#1f2937", "#6b7280", "#9ca3af"
_COLOURS = {
    "prefill": ("#d7f0f5", "#0e7490"),
    "relay": ("#fdf0c4", "#b45309"),
    "main": ("#d9f2dd", "#15803d"),
    "aggregated": ("#d9f2dd", "#15803d"),
    "frontend": ("#f1ddf5", "#86198f"),
}
_EDGES = {"kv": ("#1d4ed8", "2.4", ""), "tokens": ("#7c3aed", "1.8", "5 4")}
_MARGIN, _TITLE = 24.0, 46.0
_BOX, _ROOM = 50.0, 64.0
"""Height of a pool, and the room below it for an edge and its label."""
_PAD, _HEAD = 20.0, 34.0
"""Inside a cluster: beside the pools, and above them."""
_LANE = 30.0
"""Below the clusters, for each edge that passes one by."""
_BOW = 84.0
"""Beside the pools, where an edge goes around one."""
_ORDERED = 6
"""So many clusters are tried in every order."""
_LETTER = 7.3
"""Width of a letter, about: an SVG cannot measure text."""


@dataclass
class _Node:
    name: str
    about: str
    role: str
    column: int
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    ports: dict[str, list[tuple[float, int]]] = field(default_factory=lambda: defaultdict(list))
    """Edges that end on a side, as (where the other end lies, edge)."""

    def port(self, side: str, edge: int) -> tuple[float, float]:
        """Where an edge meets a side: its edges share it out in the order of their other ends."""
        order = [number for _, number in sorted(self.ports[side])]
        share = (order.index(edge) + 1) / (len(order) + 1)
        if side in ("left", "right"):
            return self.x + (self.width if side == "right" else 0.0), self.y + share * _BOX
        return self.x + share * self.width, self.y + (_BOX if side == "bottom" else 0.0)


def svg(graph: Graph) -> str:
    return _Drawing(graph).text()


class _Drawing:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.spec = graph, graph.spec
        self.clusters = _side_by_side(graph)
        self.nodes: dict[str, _Node] = {}
        self.columns: list[list[_Node]] = [[] for _ in self.clusters]
        self.left: list[float] = []
        self.wide: list[float] = []
        self._place()
        self._plug()
        far = ((number, *self._columns(edge)) for number, edge in enumerate(self.spec.edges))
        self.far = [number for number, a, b in far if abs(a - b) > 1]

    def text(self) -> str:
        title = f"{self.graph.name} serves {wording.title(self.graph)}"
        width = max(self.left[-1] + self.wide[-1] + _MARGIN, len(title) * _LETTER * 1.2 + 2 * _MARGIN)
        height = self.bottom + _MARGIN + _LANE * len(self.far)
        root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width:.0f} {height:.0f}"})
        root.set("width", f"{width:.0f}")
        root.set("height", f"{height:.0f}")
        root.set("font-family", "Helvetica, Arial, sans-serif")
        ET.SubElement(root, "title").text = title
        ET.SubElement(root, "rect", {"width": "100%", "height": "100%", "fill": "#ffffff"})
        _heads(root)
        _text(root, _MARGIN, 30.0, title, size=16, weight="bold", anchor="start")
        for index, (a, b) in enumerate(pairwise(self.clusters)):
            link = link_between(self.graph, a, b)
            if link:
                self._band(root, index, *link)
        for index, name in enumerate(self.clusters):
            self._cluster(root, index, name)
        labels = [self._edge(root, number, edge) for number, edge in enumerate(self.spec.edges)]
        for node in self.nodes.values():
            _pool(root, node)
        for x, y, words, colour in _apart(labels):
            _label(root, x, y, words, colour)
        ET.indent(root)
        return ET.tostring(root, encoding="unicode") + "\n"

    def _place(self) -> None:
        """Columns from left to right, pools from top to bottom."""
        for index, cluster in enumerate(self.clusters):
            column = self.columns[index]
            if cluster in self.graph.frontend_clusters:
                column.append(_Node("frontend", wording.frontend_label(self.graph), "frontend", index))
            for name, pool in self.spec.pools.items():
                if pool.cluster == cluster:
                    column.append(_Node(name, wording.pool_label(name, pool), pool.role, index))
            self.nodes.update({node.name: node for node in column})
        rows = max(len(column) for column in self.columns)
        self.bottom = _TITLE + _HEAD + rows * (_BOX + _ROOM) - _ROOM + _PAD
        x = _MARGIN
        for index, column in enumerate(self.columns):
            letters = max([len(node.about) + 4 for node in column] + [len(self.clusters[index]), 14])
            # Room for edges that go around a pool.
            bows = any(
                self._sides(edge) == ("left", "left") and self._columns(edge)[0] == index for edge in self._local
            )
            inset = _BOW if bows else _PAD
            self.left.append(x)
            self.wide.append(letters * _LETTER + inset + _PAD)
            top = _TITLE + _HEAD + (rows - len(column)) * (_BOX + _ROOM) / 2
            for row, node in enumerate(column):
                node.x, node.y, node.width = x + inset, top + row * (_BOX + _ROOM), letters * _LETTER
            x += self.wide[-1] + self._gap(index)

    def _gap(self, index: int) -> float:
        """Room between a column and the next: for the link's name and for what edges carry."""
        if index + 1 == len(self.clusters):
            return 0.0
        link = link_between(self.graph, *self.clusters[index : index + 2])
        letters = max(map(len, _about(*link))) if link else 0
        return max(70.0, letters * _LETTER + 50.0)

    @property
    def _local(self) -> list[Edge]:
        """Edges inside a cluster."""
        return [edge for edge in self.spec.edges if len(set(self._columns(edge))) == 1]

    def _columns(self, edge: Edge) -> tuple[int, int]:
        return self.nodes[edge.source].column, self.nodes[edge.target].column

    def _sides(self, edge: Edge) -> tuple[str, str]:
        """On which sides it leaves and arrives."""
        (a, b), source, target = self._columns(edge), self.nodes[edge.source], self.nodes[edge.target]
        if a != b:
            return ("right", "left") if a < b else ("left", "right")
        column = self.columns[a]
        step = column.index(target) - column.index(source)
        if abs(step) == 1:
            return ("bottom", "top") if step > 0 else ("top", "bottom")
        return ("left", "left")

    def _plug(self) -> None:
        for number, edge in enumerate(self.spec.edges):
            source, target = self.nodes[edge.source], self.nodes[edge.target]
            leaves, arrives = self._sides(edge)
            level = leaves in ("left", "right")
            source.ports[leaves].append((target.y if level else target.x, number))
            target.ports[arrives].append((source.y if level else source.x, number))

    def _band(self, root: ET.Element, index: int, name: str, link: Link) -> None:
        """A link, in the gap between its two clusters."""
        x = self.left[index] + self.wide[index]
        gap = self.left[index + 1] - x
        place = {"x": f"{x:.1f}", "y": f"{_TITLE:.1f}", "width": f"{gap:.1f}", "height": f"{self.bottom - _TITLE:.1f}"}
        ET.SubElement(root, "rect", {**place, "fill": "#f3f4f6"})
        first, *rest = _about(name, link)
        _text(root, x + gap / 2, _TITLE + 20, first, size=13, weight="bold")
        for row, line in enumerate(rest):
            _text(root, x + gap / 2, _TITLE + 37 + 15 * row, line, size=11, colour=_SOFT)

    def _cluster(self, root: ET.Element, index: int, name: str) -> None:
        place = {"x": f"{self.left[index]:.1f}", "y": f"{_TITLE:.1f}"}
        size = {"width": f"{self.wide[index]:.1f}", "height": f"{self.bottom - _TITLE:.1f}"}
        ET.SubElement(root, "rect", {**place, **size, "rx": "12", "fill": "#ffffff", "stroke": _LINE})
        _text(root, self.left[index] + self.wide[index] / 2, _TITLE + 22, name, size=13, weight="bold", colour=_SOFT)

    def _edge(self, root: ET.Element, number: int, edge: Edge) -> tuple[float, float, str, str]:
        """Draw it; returns where its label wants to be, the label, and its colour."""
        leaves, arrives = self._sides(edge)
        (x1, y1), (x2, y2) = self.nodes[edge.source].port(leaves, number), self.nodes[edge.target].port(arrives, number)
        a, b = self._columns(edge)
        words = f"{wording.cargo(edge)} {wording.carrier(edge)}".strip()
        if leaves == arrives:
            bow = x1 - _BOW * 0.8
            bends, middle = ((bow, y1), (bow, y2)), (bow * 0.75 + x1 * 0.25, (y1 + y2) / 2)
        elif leaves in ("top", "bottom"):
            half = (y1 + y2) / 2
            bends, middle = ((x1, half), (x2, half)), ((x1 + x2) / 2, half)
        elif abs(a - b) == 1:
            half = (x1 + x2) / 2
            bends, middle = ((half, y1), (half, y2)), (half, (y1 + y2) / 2)
        else:
            # Below what stands between: this is the bend that brings a curve's middle there.
            low = self.bottom + 24.0 + _LANE * self.far.index(number)
            bend, reach = (8 * low - y1 - y2) / 6, 90.0 if a < b else -90.0
            bends, middle = ((x1 + reach, bend), (x2 - reach, bend)), ((x1 + x2) / 2, low)
            if edge.link:
                words += f", {edge.link}: {wording.link_label(self.spec.links[edge.link])}"
        colour, width, dash = _EDGES[edge.carries]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (*bends, (x2, y2)))
        look = {"d": f"M {x1:.1f},{y1:.1f} C {points}", "fill": "none", "stroke": colour, "stroke-width": width}
        if dash:
            look["stroke-dasharray"] = dash
        ET.SubElement(root, "path", {**look, "marker-end": f"url(#{edge.carries})"})
        return *middle, words, colour


def _side_by_side(graph: Graph) -> list[str]:
    """The clusters in an order in which those that feed each other are neighbours, as declared where that is equal."""
    clusters = list(graph.spec.clusters)
    pairs = [tuple(graph.spec.pools[pool].cluster for pool in (edge.source, edge.target)) for edge in graph.spec.edges]

    def length(order: list[str]) -> int:
        return sum(abs(order.index(a) - order.index(b)) for a, b in pairs)

    orders = [list(order) for order in permutations(clusters)] if len(clusters) <= _ORDERED else [clusters]
    return min(orders, key=length)


def _about(name: str, link: Link) -> list[str]:
    speed, _, rtt = wording.link_label(link).partition(", ")
    return [name, speed, *rtt.split(", ")]


def _apart(labels: list[tuple[float, float, str, str]]) -> list[tuple[float, float, str, str]]:
    """Labels that would lie on each other, moved down."""
    placed: list[tuple[float, float, str, str]] = []
    for x, y, words, colour in sorted(labels, key=lambda label: label[1]):
        while any(abs(y - other[1]) < 20 and abs(x - other[0]) < 90 for other in placed):
            y += 5
        placed.append((x, y, words, colour))
    return placed


def _pool(root: ET.Element, node: _Node) -> None:
    fill, stroke = _COLOURS[node.role]
    place = {"x": f"{node.x:.1f}", "y": f"{node.y:.1f}", "width": f"{node.width:.1f}", "height": f"{_BOX:.1f}"}
    ET.SubElement(root, "rect", {**place, "rx": "8", "fill": fill, "stroke": stroke, "stroke-width": "1.3"})
    middle = node.x + node.width / 2
    _text(root, middle, node.y + 21, node.name, size=13, weight="bold")
    _text(root, middle, node.y + 38, node.about, size=11)


def _label(root: ET.Element, x: float, y: float, words: str, colour: str) -> None:
    width = len(words) * 6.1 + 12
    place = {"x": f"{x - width / 2:.1f}", "y": f"{y - 9:.1f}", "width": f"{width:.1f}", "height": "18"}
    ET.SubElement(root, "rect", {**place, "rx": "9", "fill": "#ffffff", "stroke": colour, "stroke-width": "0.8"})
    _text(root, x, y + 4, words, size=11, colour=colour)


def _text(
    root: ET.Element,
    x: float,
    y: float,
    words: str,
    *,
    size: int,
    weight: str = "normal",
    colour: str = _INK,
    anchor: str = "middle",
) -> None:
    look = {"x": f"{x:.1f}", "y": f"{y:.1f}", "font-size": str(size), "font-weight": weight, "fill": colour}
    ET.SubElement(root, "text", {**look, "text-anchor": anchor}).text = words


def _heads(root: ET.Element) -> None:
    """An arrow head for each kind of edge."""
    definitions = ET.SubElement(root, "defs")
    for kind, (colour, _, _) in _EDGES.items():
        size = {"refX": "8", "refY": "4", "markerWidth": "9", "markerHeight": "8", "markerUnits": "userSpaceOnUse"}
        head = ET.SubElement(definitions, "marker", {"id": kind, "orient": "auto", **size})
        ET.SubElement(head, "path", {"d": "M 0,0 L 9,4 L 0,8 z", "fill": colour})
