"""The fields of a request whose forms are more than a type: how they are read, and how a program is told."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema

from pdd_runtime.frontend.tools import ChosenTool

MAX_CHOICES = 128
"""Choices of one request: prompts times `n`."""
MAX_STOPS = 4
MAX_STOP = 4096
"""Characters of a stop text."""
MAX_IDS = 1024
"""Entries of `logit_bias` and of `stop_token_ids`."""

Prompt: TypeAlias = str | tuple[int, ...]


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("a stop is a text that is not empty, or a list of them")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop texts are allowed")
    if max(map(len, stops), default=0) > MAX_STOP:
        raise ValueError(f"a stop text may have {MAX_STOP} characters")
    return tuple(stops)


def _prompts(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _is_tokens(value):
            return (tuple(value),)
        if len(value) > MAX_CHOICES:
            raise ValueError(f"at most {MAX_CHOICES} prompts are allowed in one request")
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(isinstance(item, list) and item and _is_tokens(item) for item in value):
            return tuple(tuple(item) for item in value)
    raise ValueError("a prompt is a text, a list of texts, a list of token ids, or a list of those, none empty")


def _is_tokens(value: list[Any]) -> bool:
    return all(type(item) is int and item >= 0 for item in value)


def _bias(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("a logit bias is an object from token ids to numbers")
    if len(value) > MAX_IDS:
        raise ValueError(f"at most {MAX_IDS} tokens are allowed")
    biased = []
    for token, bias in value.items():
        if not (isinstance(token, str) and token.isascii() and token.isdecimal()):
            raise ValueError(f"{token!r} is no token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {token} must be a number from -100 to 100")
        biased.append((int(token), float(bias)))
    return tuple(biased)


def _tool_choice(value: object) -> object:
    if isinstance(value, str):
        if value not in ("none", "auto", "required"):
            raise ValueError("a tool choice is 'none', 'auto', 'required', or an object that names a function")
        return value
    try:
        return ChosenTool.model_validate(value)
    except ValidationError as invalid:
        wrong = invalid.errors()[0]
        where = ".".join(str(part) for part in wrong["loc"])
        raise ValueError(f"{where}: {wrong['msg']}" if where else wrong["msg"]) from None


_TOKEN = {"type": "integer", "minimum": 0}
_TEXT = {"type": "string", "minLength": 1}
_NULL = {"type": "null"}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_CHOICES},
        {"type": "array", "items": _TOKEN, "minItems": 1},
        {
            "type": "array",
            "items": {"type": "array", "items": _TOKEN, "minItems": 1},
            "minItems": 1,
            "maxItems": MAX_CHOICES,
        },
    ]
}
_STOP = _TEXT | {"maxLength": MAX_STOP}
_STOP_SCHEMA = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}, _NULL]}
_BIAS_SCHEMA = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_IDS,
        },
        _NULL,
    ]
}
_TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {"type": "object", "properties": {"name": _TEXT}, "required": ["name"]},
            },
            "required": ["type", "function"],
        },
        _NULL,
    ]
}

Prompts = Annotated[tuple[Prompt, ...], BeforeValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
Stops = Annotated[Annotated[tuple[str, ...], BeforeValidator(_stops)] | None, WithJsonSchema(_STOP_SCHEMA)]
LogitBias = Annotated[
    Annotated[tuple[tuple[int, float], ...], BeforeValidator(_bias)] | None, WithJsonSchema(_BIAS_SCHEMA)
]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=MAX_IDS)]
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"] | ChosenTool, BeforeValidator(_tool_choice)] | None,
    WithJsonSchema(_TOOL_CHOICE_SCHEMA),
]
