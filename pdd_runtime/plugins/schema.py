"""JSON Schema of the graph, with the installed plugins' settings in it, so that editors complete the YAML."""

from __future__ import annotations

import ast
import inspect
import textwrap
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from pdd_runtime.graph import Graph
from pdd_runtime.plugins.manager import PluginManager

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PLACES = {
    "engine": (("Pool", "engine"),),
    "transport": (("Edge", "transport"),),
    "routing policy": (("Spec", "routing"), ("Variant", "routing")),
    "handoff strategy": (("Spec", "handoff"), ("Variant", "handoff")),
    "discovery": (("Spec", "discovery"),),
}
"""Where the graph names plugins of each kind."""


def graph_schema(plugins: PluginManager) -> dict[str, Any]:
    """What a graph's YAML may say, where plugins are those of `plugins`."""
    schema = Graph.model_json_schema(schema_generator=_Generator)
    definitions: dict[str, Any] = schema["$defs"]
    form = definitions.pop("PluginRef")
    for noun, places in _PLACES.items():
        name = f"PluginRef.{noun.replace(' ', '-')}"
        definitions[name] = _reference(noun, form, plugins, definitions)
        for owner, key in places:
            definitions[owner]["properties"][key] = _pointing(definitions[owner]["properties"][key], name)
    _close(schema)
    return {"$schema": DIALECT, "title": "pdd-runtime graph", **{k: v for k, v in schema.items() if k != "title"}}


def settings_schema(form: type[BaseModel]) -> dict[str, Any]:
    """JSON Schema of a plugin's settings. A field's docstring is its description, whether the form asks pydantic for
    that or not."""
    schema = form.model_json_schema(schema_generator=_Generator)
    for name, text in _docstrings(form).items():
        field = form.model_fields.get(name)
        shown = schema.get("properties", {}).get((field.alias or name) if field else name)
        if shown is not None and not (field and field.description):
            shown["description"] = text
    return schema


class _Generator(GenerateJsonSchema):
    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        """Quantities are written with their unit in a default, too."""
        shown = super().default_schema(schema)
        write = schema["schema"].get("serialization", {}).get("function")
        if shown.get("type") == "string" and isinstance(shown.get("default"), (int, float)) and write:
            shown["default"] = write(shown["default"])
        return shown


def _reference(noun: str, form: dict[str, Any], plugins: PluginManager, definitions: dict[str, Any]) -> dict[str, Any]:
    """The form of a plugin reference where only plugins of one kind may stand, each with its own settings."""
    entries = sorted((entry for entry in plugins.registered if entry.kind.noun == noun), key=lambda entry: entry.name)
    cases = []
    for entry in entries:
        settings = settings_schema(entry.cls.Config)
        own = f"{noun.replace(' ', '-')}.{entry.name}"
        inner = settings.pop("$defs", {})
        definitions.update({f"{own}.{name}": _moved(value, own) for name, value in inner.items()})
        definitions[own] = _moved(settings, own)
        cases.append(
            {
                "if": {"properties": {"plugin": {"const": entry.name}}, "required": ["plugin"]},
                "then": {"properties": {"config": {"$ref": f"#/$defs/{own}"}}},
            }
        )
    about = form["properties"]["plugin"]
    plugin = {**about, "enum": [entry.name for entry in entries]}
    return {
        **form,
        "title": noun.capitalize(),
        "properties": {**form["properties"], "plugin": plugin},
        **({"allOf": cases} if cases else {}),
    }


def _moved(value: Any, own: str) -> Any:
    """A settings' schema with its references led to where its definitions stand now."""
    if isinstance(value, dict):
        return {
            key: f"#/$defs/{own}.{item.rpartition('/')[2]}" if key == "$ref" else _moved(item, own)
            for key, item in value.items()
        }
    return [_moved(item, own) for item in value] if isinstance(value, list) else value


def _pointing(value: Any, name: str) -> Any:
    """The same with its reference to `PluginRef` led to the one of its kind."""
    if isinstance(value, dict):
        return {
            key: f"#/$defs/{name}" if item == "#/$defs/PluginRef" else _pointing(item, name)
            for key, item in value.items()
        }
    return [_pointing(item, name) for item in value] if isinstance(value, list) else value


def _close(value: Any) -> None:
    """A mapping by name takes nothing but names."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _close(item)
    if isinstance(value, dict) and isinstance(value.get("patternProperties"), dict):
        value.setdefault("additionalProperties", False)


def _docstrings(form: type[BaseModel]) -> dict[str, str]:
    """The text below each field of a class and of those it is made from."""
    found: dict[str, str] = {}
    for cls in reversed(form.__mro__):
        if cls is BaseModel or not issubclass(cls, BaseModel):
            continue
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        except (OSError, TypeError, SyntaxError, ValueError):
            continue
        body = tree.body if isinstance(tree, ast.ClassDef) else []
        for statement, below in pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and _is_text(below):
                assert isinstance(below, ast.Expr)
                assert isinstance(below.value, ast.Constant)
                found[statement.target.id] = " ".join(str(below.value.value).split())
    return found


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
