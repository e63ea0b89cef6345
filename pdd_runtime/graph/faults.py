"""What pydantic finds wrong, told with the line, the nearest name and the fix."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pdd_runtime.errors import GraphError
from pdd_runtime.graph.document import Document, Route, dotted
from pdd_runtime.graph.secrets import redacted

_FORM = "docs/graph.md says what may stand here"
_NEAR = 0.6
"""How like two names must be, of 1."""
_FORMS = {
    "int": "a whole number",
    "float": "a number",
    "string": "text",
    "bool": "true or false",
    "model": "a mapping (key: value)",
    "dict": "a mapping (key: value)",
    "tuple": "a list",
    "list": "a list",
}


class GraphErrors(GraphError):
    """Several faults of one graph. It reads like the first; `errors` has them all, in the file's order."""

    code = "graphs"

    def __init__(
        self, what: str, *, where: str = "", why: str = "", fix: str = "", errors: tuple[GraphError, ...] = ()
    ) -> None:
        self.errors = errors
        super().__init__(what, where=where, why=why, fix=fix)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors) or super().__str__()


def raise_all(errors: Sequence[GraphError]) -> None:
    """Nothing for no error, the error itself for one, `GraphErrors` for more."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        first = errors[0]
        raise GraphErrors(first.what, where=first.where, why=first.why, fix=first.fix, errors=tuple(errors))


def nearest(name: str, names: Iterable[str]) -> str:
    """`did you mean "x"?`, or nothing where no name is near."""
    close = get_close_matches(name, list(names), n=1, cutoff=_NEAR)
    return f'did you mean "{close[0]}"?' if close else ""


def keys_at(model: type[BaseModel], route: Route) -> list[str]:
    """The keys that the form knows at `route` below `model`; none where any key is allowed."""
    kind = _kind_at(model, route)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [field.alias or name for name, field in kind.model_fields.items()]
    return []


def _kind_at(model: type[BaseModel], route: Route) -> Any:
    kind: Any = model
    for step in route:
        kind = _bare(kind)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            fields = {field.alias or name: field.annotation for name, field in kind.model_fields.items()}
            kind = fields.get(str(step))
        else:
            arguments = get_args(kind)
            kind = arguments[1] if get_origin(kind) is dict else arguments[0] if arguments else None
    return _bare(kind)


def _field_at(model: type[BaseModel], route: Route) -> FieldInfo | None:
    """The field that a route leads to, where it leads to one."""
    form = _kind_at(model, route[:-1])
    if not (route and isinstance(form, type) and issubclass(form, BaseModel)):
        return None
    fields = {field.alias or name: field for name, field in form.model_fields.items()}
    return fields.get(str(route[-1]))


def default_of(field: FieldInfo | None) -> str:
    """What a wrong value may be instead, as a fix; empty where the key must be there, or has no plain default."""
    default = field.default if field is not None else None
    if default is PydanticUndefined or default is None or isinstance(default, (BaseModel, tuple, dict)):
        return ""
    return f"leave it out for the default, {str(default).lower() if isinstance(default, bool) else default}"


def _bare(kind: Any) -> Any:
    while get_origin(kind) in (Annotated, Union, types.UnionType):
        kind = next(option for option in get_args(kind) if option is not type(None))
    return kind


def explain_all(
    faults: Iterable[Mapping[str, Any]], model: type[BaseModel], document: Document, base: Route = ()
) -> list[GraphError]:
    """Every fault once: a key that is missing because it is misspelt is told as the misspelling."""
    faults = list(faults)
    missing = {tuple(fault["loc"]) for fault in faults if fault["type"] == "missing"}
    meant = {}
    for fault in faults:
        location = tuple(fault["loc"])
        if fault["type"] == "extra_forbidden":
            lacking = [str(other[-1]) for other in missing if other[:-1] == location[:-1]]
            close = get_close_matches(str(location[-1]), lacking, n=1, cutoff=_NEAR)
            if close:
                meant[location] = close[0]
    misspelt = {(*location[:-1], key) for location, key in meant.items()}
    return [
        explain(fault, model, document, base, meant.get(tuple(fault["loc"]), ""))
        for fault in faults
        if not (fault["type"] == "missing" and tuple(fault["loc"]) in misspelt)
    ]


def explain(
    fault: Mapping[str, Any], model: type[BaseModel], document: Document, base: Route = (), meant: str = ""
) -> GraphError:
    """One entry of `ValidationError.errors()` as a `GraphError`. `base` is where `model` stands in the document,
    `meant` the missing key that an unknown one stands for."""
    location: Route = tuple(fault["loc"])
    kind, value = str(fault["type"]), fault["input"]
    if location and location[-1] == "[key]":
        location, value = location[:-1], location[-2]
    inner, key = location[:-1], location[-1] if location else ""
    route, parent = (*base, *location), (*base, *inner)
    known, field = keys_at(model, inner), _field_at(model, location)
    if kind == "extra_forbidden":
        return GraphError(
            f'unknown key "{key}" in {dotted(parent)}',
            where=document.locate_key(route),
            why=f"the keys here are {', '.join(known)}" if known else "no key is known here",
            fix=f'did you mean "{meant}"?' if meant else nearest(str(key), known) or "remove it",
        )
    if kind == "missing":
        if isinstance(key, int):
            return GraphError(
                f"{dotted(parent)} lacks item {key + 1}",
                where=document.locate(parent),
                why=_required(_field_at(model, inner)),
                fix="add it to the list",
            )
        return GraphError(
            f'{dotted(parent)} has no "{key}"',
            where=document.locate(parent),
            why=_required(field),
            fix=f'add "{key}:" below it',
        )
    if kind == "string_pattern_mismatch":
        of_key = fault["loc"][-1] == "[key]"
        return GraphError(
            f'"{value}" in {dotted(parent if of_key else route)} is not a name',
            where=document.locate_key(route) if of_key else document.locate(route),
            why="names are lower-case letters, digits and dashes, at most 63, with no dash at either end",
            fix=_named(str(value)),
        )
    context: Mapping[str, Any] = fault.get("ctx", {})
    why, fix = _sentence(kind, str(fault["msg"]), context), str(getattr(context.get("error"), "fix", ""))
    if kind == "literal_error":
        options = [option for option in str(context["expected"]).split("'")[1::2] if option]
        why, fix = f"it must be {' or '.join(options)}", nearest(str(value), options)
    if kind == "string_type" and isinstance(value, (bool, int, float)):
        fix = "write it in quotes, so that YAML reads it as text"
    fix = fix or default_of(field) or _FORM
    value = redacted(value, str(key))
    return GraphError(f"{dotted(route)} is {_shown(value)}", where=document.locate(route), why=why, fix=fix)


def _required(field: FieldInfo | None) -> str:
    """With what a key is for, in the models' words."""
    text = " ".join((field.description or "").split()) if field is not None else ""
    return f"it is required: {text[:1].lower()}{text[1:].rstrip('.')}" if text else "it is required"


def _named(text: str) -> str:
    """A name like `text`."""
    name = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].strip("-")
    return f'did you mean "{name}"?' if name else "choose another name"


def _sentence(kind: str, message: str, context: Mapping[str, Any]) -> str:
    if "error" in context:
        return str(context["error"])
    form = _FORMS.get(kind.split("_")[0]) if kind.endswith(("_type", "_parsing", "_from_float")) else None
    return f"it must be {form}" if form else message.replace("Input should", "it should")


def _shown(value: object) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]}…'"
