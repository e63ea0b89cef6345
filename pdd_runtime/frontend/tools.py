"""Tools that a model may call, and whether it may, or must."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints

MAX_TOOLS = 512

Name = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(BaseModel):
    """What else it holds reaches the chat template as it is."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON Schema of an object; none: the function takes nothing."""
    strict: bool | None = None


class Tool(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["function"]
    function: Function


class ChosenFunction(BaseModel):
    model_config = ConfigDict(strict=True)

    name: Name


class ChosenTool(BaseModel):
    """The one tool that must be called."""

    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: ChosenFunction


def one_of(tools: Sequence[Tool], *, parallel: bool) -> dict[str, Any]:
    """The schema of a list of at least one call of any tool; not `parallel`: of exactly one."""
    schema = {"type": "array", "minItems": 1, "items": _any_call(tools, "arguments")} | _definitions(tools)
    return schema if parallel else schema | {"maxItems": 1}


def one_call(tools: Sequence[Tool], arguments: str) -> dict[str, Any]:
    """The schema of a call of any tool; `arguments`: how the model's family calls them."""
    return _any_call(tools, arguments) | _definitions(tools)


def arguments_of(tool: Tool) -> dict[str, Any]:
    """The schema of a call's arguments."""
    return tool.function.parameters or _NOTHING


_NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


def _any_call(tools: Sequence[Tool], arguments: str) -> dict[str, Any]:
    return {"anyOf": [_call(tool, arguments) for tool in tools]}


def _call(tool: Tool, arguments: str) -> dict[str, Any]:
    own = {key: value for key, value in arguments_of(tool).items() if key not in _DEFINITIONS}
    return {
        "type": "object",
        # In this order in the text, too: so the name can be told before its arguments are written.
        "properties": {"name": {"const": tool.function.name}, arguments: _moved(own, tool.function.name)},
        "required": ["name", arguments],
        "additionalProperties": False,
    }


_DEFINITIONS = ("$defs", "definitions")


def _definitions(tools: Sequence[Tool]) -> dict[str, Any]:
    """What the tools' schemas point to. References are looked up from the root, so all of it must stand there."""
    moved: dict[str, Any] = {}
    for key in _DEFINITIONS:
        found = {
            f"{tool.function.name}.{name}": _moved(schema, tool.function.name)
            for tool in tools
            for name, schema in ((tool.function.parameters or {}).get(key) or {}).items()
        }
        if found:
            moved[key] = found
    return moved


def _moved(schema: Any, tool: str) -> Any:
    """`schema` with its references to definitions as those are named at the root."""
    if isinstance(schema, list):
        return [_moved(item, tool) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _reference(value, tool) if key == "$ref" else _moved(value, tool) for key, value in schema.items()}


def _reference(target: Any, tool: str) -> Any:
    for key in _DEFINITIONS:
        if isinstance(target, str) and target.startswith(f"#/{key}/"):
            return f"#/{key}/{tool}.{target.removeprefix(f'#/{key}/')}"
    return target
