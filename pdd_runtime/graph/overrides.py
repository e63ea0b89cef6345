"""`--set spec.a.b=value`: one value of the graph, changed from the command line."""

from __future__ import annotations

from typing import Any

from pdd_runtime.errors import GraphError
from pdd_runtime.graph.document import Document, Route, dotted, parse_value
from pdd_runtime.graph.secrets import is_secret, redacted


def apply(document: Document, override: str) -> None:
    """Set the value at a path. The value is YAML; list indices are numbers, and the index behind the last
    item appends. Raises `GraphError` that names the override."""
    path, equals, text = override.partition("=")
    steps = path.strip().split(".")
    secret = next(filter(is_secret, steps), "")
    where = f"--set {path}={redacted(text, secret)}" if equals else f"--set {override}"
    if not equals or not all(steps):
        raise GraphError(
            "this is not an override", where=where, fix="write a path and a value: --set spec.frontend.port=9000"
        )
    value = parse_value(text, where)
    _Override(document, where, steps).set(value)


class _Override:
    def __init__(self, document: Document, where: str, steps: list[str]) -> None:
        self.document, self.where, self.steps = document, where, steps

    def set(self, value: Any) -> None:
        here: Any = self.document.data
        route: Route = ()
        for step in self.steps[:-1]:
            key = self._key(here, route, step)
            if isinstance(here, list) and key == len(here):
                here.append({})
            elif isinstance(here, dict) and here.get(str(key)) is None:
                here[str(key)] = {}
            here, route = here[key], (*route, key)
            # Made on the way: the override is where it stands.
            self.document.values.setdefault(route, self.where)
            self.document.keys.setdefault(route, self.where)
        key = self._key(here, route, self.steps[-1])
        if isinstance(here, list) and key == len(here):
            here.append(value)
        else:
            here[key] = value
        self._note((*route, key))

    def _key(self, here: Any, route: Route, step: str) -> str | int:
        if isinstance(here, dict):
            return step
        if not isinstance(here, list):
            raise GraphError(
                f"{dotted(route)} is one value: nothing is below it", where=self.where, why=f"it is {here!r}"
            )
        if not step.isdecimal() or int(step) > len(here):
            raise GraphError(
                f'{dotted(route)} is a list: "{step}" is no place in it',
                where=self.where,
                why=f"it has {len(here)} items",
                fix=f"write a number from 0 to {len(here)}; {len(here)} appends",
            )
        return int(step)

    def _note(self, route: Route) -> None:
        for places in (self.document.values, self.document.keys):
            for old in [known for known in places if known[: len(route)] == route]:
                del places[old]
            places[route] = self.where
