"""The turns of a conversation, as clients send them and as chat templates expect them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import from_json

MAX_MESSAGES = 8192
MAX_PARTS = 1024
"""Parts of one message's content, and calls of tools in one message."""

_CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "maxItems": MAX_PARTS,
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
        {"type": "null"},
    ]
}


def _content(value: object) -> object:
    if not isinstance(value, list):
        return value
    if len(value) > MAX_PARTS:
        raise ValueError(f"at most {MAX_PARTS} content parts are allowed")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"only content parts of type 'text' are supported, this one is {kind!r}")
        texts.append(part["text"])
    return "\n".join(texts)


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    arguments: str = "{}"
    """JSON, as it was answered."""

    def for_template(self) -> dict[str, Any]:
        # Templates write the arguments themselves, so they must see what is in them.
        try:
            read = from_json(self.arguments or "{}")
        except ValueError:
            read = self.arguments
        return self.model_dump() | {"arguments": read}


class ToolCall(BaseModel):
    """A call that an earlier answer made."""

    model_config = ConfigDict(strict=True, extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True) | {"function": self.function.for_template()}


class Message(BaseModel):
    """One turn. What else it holds (`name`, `tool_call_id`, …) reaches the chat template as it is."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content), WithJsonSchema(_CONTENT_SCHEMA)] = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_PARTS)

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role '{self.role}' needs content")
        return self

    def for_template(self) -> dict[str, Any]:
        message = self.model_dump(exclude_unset=True, exclude={"tool_calls"})
        if self.role == "developer":
            message["role"] = "system"  # the same thing by its newer name; templates know the old one
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message
