"""Tools for models whose chat template knows none: told in the system's message, in the words of Hermes's format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pdd_runtime.frontend.calls import CLOSE, OPEN

_HOW = (
    "You can call functions when they help with the user's request. These are the functions, one in each line, with "
    "their parameters as JSON Schema:\n<tools>\n{tools}\n</tools>\n"
    "For each call write one JSON object with the function's name and its arguments, between tags:\n"
    + OPEN
    + '\n{{"name": "the_function", "arguments": {{"a_parameter": "its value"}}}}\n'
    + CLOSE
    + "\nThe result of a call comes between <tool_response> tags."
)


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the tools told first, and its calls and their results written as text."""
    turns = [as_text(message) for message in messages]
    if not tools:
        return turns
    told = _HOW.format(tools="\n".join(_json(tool.get("function", tool)) for tool in tools))
    if turns and turns[0].get("role") == "system":
        first = turns.pop(0)
        told = f"{first['content']}\n\n{told}"
    return [{"role": "system", "content": told}, *turns]


def as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """A turn without calls as it is; a call is written as the model would, a result as the user's words."""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return dict(message)
    calls = [f"{OPEN}\n{_json(_call(call['function']))}\n{CLOSE}" for call in message["tool_calls"]]
    said = [message["content"]] if message.get("content") else []
    return {"role": "assistant", "content": "\n".join([*said, *calls])}


def _call(function: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": function["name"], "arguments": function["arguments"]}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
