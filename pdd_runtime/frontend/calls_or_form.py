"""The form of an answer that calls tools, or else is JSON of a given form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pdd_runtime.errors import RequestError
from pdd_runtime.frontend.calls import CLOSE, OPEN, TOOL_CALLS
from pdd_runtime.frontend.guides import encoded
from pdd_runtime.frontend.language import Language
from pdd_runtime.frontend.tools import Tool, one_call, one_of
from pdd_runtime.plugins.engine import Guide

_BLANKS = {"x-guidance": {"whitespace_pattern": r"\n?[ \t]{0,20}"}}
"""What an engine says of a schema that stands alone must be said of one inside a grammar."""


def calls_or_form(tools: Sequence[Tool], form: Guide, field: str, language: Language, *, parallel: bool) -> Guide:
    """Calls of `tools` as the model writes them, with arguments of their schemas, or an answer of `form`, which
    `field` asks for. Raises `RequestError` where the model writes calls in a way that no schema describes."""
    answer = json.loads(form.text) if form.kind == "json_schema" else {"type": "object"}
    match language.call_style:
        case "hermes":
            opening, closing = _marker(OPEN, language), _marker(CLOSE, language)
            calls, call = f'{opening} "\\n" call "\\n" {closing}', one_call(tools, "arguments")
            between = '"\\n"'
        case "llama":
            calls, call, between = "call", one_call(tools, "parameters"), '";"'
        case "mistral":
            calls, call = f'{_marker(TOOL_CALLS, language)} " "? call', one_of(tools, parallel=parallel)
            parallel, between = False, ""
        case "qwen-coder":
            raise RequestError(
                "an answer of a given form cannot call tools",
                where=field,
                why="this model does not write calls as JSON",
                fix="set 'tool_choice' to 'none', or leave one of the two out",
            )
    more = f" ({between} {calls})*" if parallel else ""
    rules = [f"start: answer | {calls}{more}", f"call: %json {_schema(call)}", f"answer: %json {_schema(answer)}"]
    return Guide(kind="grammar", text="\n".join(rules))


def _schema(schema: dict[str, Any]) -> str:
    return encoded(_BLANKS | schema)


def _marker(text: str, language: Language) -> str:
    """In a grammar: the token itself, for such is not made of its text."""
    token = language.marker_ids.get(text)
    return json.dumps(text) if token is None else f"<[{token}]>"
