"""Which form an answer must have, in all the fields by which clients ask for one."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, WithJsonSchema
from pydantic_core import from_json

from pdd_runtime.errors import RequestError
from pdd_runtime.plugins.engine import Guide

MAX_FORM = 2**18
"""Characters of a schema, expression or grammar."""


def encoded(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _schema_text(value: object) -> object:
    if isinstance(value, str):
        try:
            value = from_json(value)
        except ValueError as error:
            raise ValueError(f"a JSON Schema is an object or its JSON text: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("a JSON Schema is an object or its JSON text")
    schema = encoded(value)
    if len(schema) > MAX_FORM:
        raise ValueError(f"a JSON Schema may have {MAX_FORM} characters, not {len(schema)}")
    return schema


Filled = Annotated[str, StringConstraints(min_length=1, max_length=MAX_FORM)]
Schema = Annotated[
    str, BeforeValidator(_schema_text), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})
]
"""A JSON Schema, as its JSON text."""
Choices = Annotated[list[Filled], Field(min_length=1, max_length=1000)]


class JsonSchema(BaseModel):
    """OpenAI's wrapping of a schema."""

    model_config = ConfigDict(strict=True)

    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Taken, and always so: the form is kept while the answer is made."""


class ResponseFormat(BaseModel):
    """OpenAI's field. `json_schema` goes with the type of that name."""

    model_config = ConfigDict(strict=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def guide(self) -> Guide | None:
        if self.type == "text":
            return None
        if self.type == "json_object":
            return Guide(kind="json_object")
        if self.json_schema is None:
            raise RequestError("needs 'json_schema'", where="response_format.json_schema")
        if self.json_schema.schema_ is None:
            return Guide(kind="json_object")
        text = encoded(self.json_schema.schema_)
        if len(text) > MAX_FORM:
            raise RequestError(
                f"may have {MAX_FORM} characters, not {len(text)}", where="response_format.json_schema.schema"
            )
        return Guide(kind="json_schema", text=text)


class StructuredOutputs(BaseModel):
    """vLLM's field: exactly one of these."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: Schema | None = Field(None, alias="json")
    regex: Filled | None = None
    choice: Choices | None = None
    grammar: Filled | None = None
    json_object: bool | None = None

    def guides(self) -> list[Guide]:
        found = guides(self.json_, self.regex, self.choice, self.grammar)
        return [*found, Guide(kind="json_object")] if self.json_object else found


def guides(schema: str | None, regex: str | None, choice: list[str] | None, grammar: str | None) -> list[Guide]:
    """One for each that is given."""
    found: list[Guide] = []
    if schema is not None:
        found.append(Guide(kind="json_schema", text=schema))
    if regex is not None:
        found.append(Guide(kind="regex", text=regex))
    if choice is not None:
        found.append(Guide(kind="choice", text=encoded(choice)))
    if grammar is not None:
        found.append(Guide(kind="grammar", text=grammar))
    return found
