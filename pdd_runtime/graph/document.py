"""A YAML text as plain data that remembers where each value stood."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.reader import ReaderError

from pdd_runtime.errors import GraphError

Route = tuple[str | int, ...]
"""The way from the root to a value: keys and list indices."""

MAX_BYTES = 1 << 20
MAX_VALUES = 50_000
"""After aliases are written out: a few nested aliases can stand for billions of values."""
MAX_DEPTH = 32

_TAG = "tag:yaml.org,2002:"
_FORM = "docs/graph.md shows the form, graphs/ has examples"


def dotted(route: Route) -> str:
    """`("spec", "edges", 1)` as `spec.edges.1`, which `--set` takes as well."""
    return ".".join(str(step) for step in route) or "the graph"


@dataclass
class Document:
    """The data of one file, and the place of every key and value in it."""

    name: str
    data: dict[str, Any] = field(default_factory=dict)
    values: dict[Route, str] = field(default_factory=dict)
    keys: dict[Route, str] = field(default_factory=dict)

    def locate(self, route: Route) -> str:
        """`file:line:column` (or the `--set`) of the value at `route`, or of the nearest one around it."""
        while route and route not in self.values:
            route = route[:-1]
        return self.values.get(route, self.name)

    def locate_key(self, route: Route) -> str:
        """The same of the key that leads to it."""
        return self.keys.get(route) or self.locate(route)


def read(path: Path) -> Document:
    """The document in a file. Raises `GraphError`."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise GraphError("there is no such file", where=str(path), fix="give the path of a graph's YAML") from error
    except IsADirectoryError as error:
        raise GraphError("this is a directory", where=str(path), fix="give the path of a graph's YAML") from error
    except (OSError, ValueError) as error:
        raise GraphError("the file cannot be read", where=str(path), why=str(error)) from error
    if len(raw) > MAX_BYTES:
        raise GraphError(
            "the file is too large for a graph", where=str(path), why=f"it has more than {MAX_BYTES} bytes"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise GraphError(
            "the file is not UTF-8 text", where=f"{path}:{line}", why=error.reason, fix="save it as UTF-8"
        ) from error
    return parse(text, str(path))


def parse(text: str, name: str) -> Document:
    """The document in `text`; `name` stands for the file in messages. Raises `GraphError`."""
    node = compose(text, name)
    if node is None:
        raise GraphError("the file is empty", where=name, fix=_FORM)
    document = Document(name)
    data = _Reader(document).value(node, ())
    if not isinstance(data, dict):
        raise GraphError(
            f"the graph is {_noun(data)}", where=document.locate(()), why="it must be a mapping (key: value)", fix=_FORM
        )
    document.data = data
    return document


def parse_value(text: str, name: str) -> Any:
    """One value written as YAML, as `--set` takes it. An empty text is the empty string."""
    node = compose(text, name)
    return "" if node is None else _Reader(Document(name), place=name).value(node, ())


def compose(text: str, name: str) -> yaml.Node | None:
    """The nodes of `text`, with marks. Nothing is constructed, so no tag can run code."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise GraphError(
            "the YAML holds a character that may not stand there",
            where=f"{name}:{line}",
            why=f"U+{ord(text[error.position]):04X}: {error.reason}",
            fix="remove it, or write it as an escape in double quotes",
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = " ".join(filter(None, [error.context, _line(error.context_mark)]))
        raise GraphError(
            f"this is not valid YAML: {error.problem or error.context}",
            where=f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name,
            why=why,
            fix="look at the indentation (spaces only), quotes and brackets on this line and the one before",
        ) from error
    except RecursionError as error:
        raise GraphError("the YAML is nested too deeply", where=name, why=f"at most {MAX_DEPTH} levels") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML lets a few of Python's own errors out, e.g. for an escape beyond Unicode.
        raise GraphError("this is not valid YAML", where=name, why=str(error)) from error


def _line(mark: yaml.Mark | None) -> str:
    return f"on line {mark.line + 1}" if mark else ""


def _noun(value: object) -> str:
    if value is None:
        return "empty"
    return {list: "a list", dict: "a mapping", str: "text", bool: "true or false"}.get(type(value), "a number")


def _bounded(value: int) -> int:
    if value.bit_length() > 64:
        raise ValueError(f"it has {value.bit_length()} bits, and 64 are allowed")
    return value


class _Reader:
    """Nodes to data, with the limits held and every place noted."""

    def __init__(self, document: Document, place: str | None = None) -> None:
        self.document = document
        self._place = place
        self._count = 0
        self._merges = 0
        self._scalars = SafeConstructor()

    def value(self, node: yaml.Node, route: Route) -> Any:
        self._count += 1
        if self._count > MAX_VALUES:
            raise self._error("the graph holds too many values", node, why=f"more than {MAX_VALUES}, aliases included")
        if len(route) > MAX_DEPTH:
            raise self._error("the YAML is nested too deeply", node, why=f"at most {MAX_DEPTH} levels with aliases")
        self.document.values[route] = self._where(node)
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            return self._mapping(node, route)
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return [self.value(item, (*route, index)) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        raise self._unknown_tag(node)

    def _mapping(self, node: yaml.MappingNode, route: Route) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for source in self._merged(node):
            self._merges += 1
            if self._merges > MAX_DEPTH:
                raise self._error("<< is nested too deeply", node)
            data.update(self._mapping(source, route))
            self._merges -= 1
        own: dict[str, yaml.Node] = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                continue
            key = self._key(key_node)
            here = (*route, key)
            if key in own:
                raise self._error(
                    f'the key "{key}" stands twice in {dotted(route)}',
                    key_node,
                    why=f"it is on line {own[key].start_mark.line + 1} already",
                    fix="keep one of them",
                )
            own[key] = key_node
            # What a merge brought for this key is replaced whole, its places too.
            for old in [known for known in self.document.values if known[: len(here)] == here] if key in data else ():
                del self.document.values[old]
            data[key] = self.value(value_node, here)
            self.document.keys[here] = self._where(key_node)
        return data

    def _merged(self, node: yaml.MappingNode) -> Iterator[yaml.MappingNode]:
        """The mappings that `<<` brings in, the one that counts most last."""
        for key_node, value_node in node.value:
            if key_node.tag != f"{_TAG}merge":
                continue
            sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for source in reversed(sources):
                if not isinstance(source, yaml.MappingNode) or source.tag != f"{_TAG}map":
                    raise self._error("<< takes a mapping, or a list of mappings", value_node)
                yield source

    def _key(self, node: yaml.Node) -> str:
        value = self._scalar(node) if isinstance(node, yaml.ScalarNode) else None
        if isinstance(value, str):
            return value
        if isinstance(node, yaml.ScalarNode) and value is not None:
            why = f"YAML reads {node.value} as {value!r}".replace("True", "true").replace("False", "false")
            raise self._error("a key must be text", node, why=why, fix=f'write "{node.value}" in quotes')
        kind = {yaml.MappingNode: "a mapping", yaml.SequenceNode: "a list", yaml.ScalarNode: "empty"}[type(node)]
        why = f"this one is {kind}"
        fix = "write a name before the colon; what has braces, as a template's {{ name }}, goes in quotes"
        raise self._error("a key must be text", node, why=why, fix=fix)

    def _scalar(self, node: yaml.ScalarNode) -> Any:
        kind = node.tag.removeprefix(_TAG)
        text = str(node.value)
        try:
            text.encode()
            if kind == "null":
                return None
            if kind == "bool":
                return self._scalars.construct_yaml_bool(node)
            # 1:30 is a number of base 60 to YAML 1.1, and to nobody else.
            if kind == "int" and ":" not in text:
                return _bounded(self._scalars.construct_yaml_int(node))
            if kind == "float" and ":" not in text:
                return self._scalars.construct_yaml_float(node)
        except (ValueError, KeyError, OverflowError) as error:
            shown = text if len(text) < 40 else f"{text[:36]}…"
            raise self._error(f"the value {shown!r} cannot be read", node, why=f"{kind}: {error}") from error
        if kind in ("str", "int", "float", "timestamp", "value", "merge"):
            return text
        raise self._unknown_tag(node)

    def _unknown_tag(self, node: yaml.Node) -> GraphError:
        tag = node.tag.replace(_TAG, "!!")
        return self._error(f"the YAML tag {tag} has no meaning in a graph", node, fix="write plain values")

    def _where(self, node: yaml.Node) -> str:
        mark = node.start_mark
        return self._place or f"{self.document.name}:{mark.line + 1}:{mark.column + 1}"

    def _error(self, what: str, node: yaml.Node, *, why: str = "", fix: str = "") -> GraphError:
        return GraphError(what, where=self._where(node), why=why, fix=fix)
