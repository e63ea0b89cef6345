"""The API as a document for programs: OpenAPI 3.1, at /openapi.json."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from pdd_runtime.frontend.doors import OPEN
from pdd_runtime.frontend.request_ids import HEADER
from pdd_runtime.frontend.requests import Body, ChatRequest, CompletionRequest

Schema = dict[str, Any]

_BODIES: dict[str, type[Body]] = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
_TEXT: Schema = {"type": "string"}
_EVENT: Schema = {"type": "object", "properties": {"data": _TEXT}, "required": ["data"]}
"""`data` is a chunk in OpenAI's form as JSON, an error, or `[DONE]`."""
_COUNT: Schema = {"type": "integer", "minimum": 0}
_SCHEME = "APIKey"
_AGAIN: Schema = {HEADER: {"schema": _TEXT}, "Retry-After": {"required": True, "schema": _COUNT}}
_LIMITS: Schema = {
    f"x-ratelimit-{what}-{of}": {"schema": _TEXT if what == "reset" else _COUNT}
    for what in ("limit", "remaining", "reset")
    for of in ("requests", "tokens")
}
"""Of keys that have such limits."""


def describe(app: FastAPI, *, keys: bool = False) -> None:
    """Have `app` serve this document in place of the one that FastAPI would make. `keys`: it asks for API keys."""
    made: Schema = {}

    def document() -> Schema:
        if not made:
            made.update(_document(app, keys=keys))
        return made

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, *, keys: bool) -> Schema:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    paths: Schema = document["paths"]
    for path, operations in paths.items():
        for operation in operations.values():
            # Path parameters are texts, so FastAPI's own complaint about them cannot come.
            operation["responses"].pop("422", None)
            operation["responses"] |= {"4XX": _refers("ErrorResponse"), "5XX": _refers("ErrorResponse")}
            operation["responses"]["200"] = _refers(_ANSWERS[path]) if path in _ANSWERS else {"description": "OK"}
            if keys and path not in OPEN:
                operation["security"] = [{_SCHEME: []}]
                operation["responses"]["401"] = _refers("ErrorResponse")
                operation["responses"]["401"]["headers"] = {"WWW-Authenticate": {"schema": _TEXT}}
            for response in operation["responses"].values():
                response.setdefault("headers", {})[HEADER] = {"schema": _TEXT}
    if "/pdd/requests/{request_id}" in paths:
        paths["/pdd/requests/{request_id}"]["delete"]["responses"]["200"] = _refers("Cancelled")
    for path, body in _BODIES.items():
        if path not in paths:
            continue
        operation = paths[path]["post"]
        operation["responses"]["429"] = _refers("ErrorResponse") | {"headers": _LIMITS | _AGAIN}
        if keys:
            operation["responses"]["200"]["headers"] |= _LIMITS
        operation["requestBody"] = {"required": True, "content": _json(_reference(body.__name__))}
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": _EVENT}
    if "/metrics" in paths:
        paths["/metrics"]["get"]["responses"]["200"]["content"] = {"text/plain": {"schema": _TEXT}}
    document["components"] = {"schemas": _requests() | _RESPONSES}
    if keys:
        document["components"]["securitySchemes"] = {_SCHEME: {"type": "http", "scheme": "bearer"}}
    return document


def _requests() -> Schema:
    _, found = models_json_schema(
        [(body, "validation") for body in _BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    schemas: Schema = found["$defs"]
    for body in _BODIES.values():
        for name, neutral in body.refused.items():
            schemas[body.__name__]["properties"][name] = {
                "enum": [None, *neutral],
                "description": "Not supported, so only what leaves the answer as it is.",
            }
    return schemas


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _refers(name: str) -> Schema:
    return {"description": _RESPONSES[name]["description"], "content": _json(_reference(name))}


def _object(description: str, optional: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """`optional` ones may be absent."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "description": description, "properties": properties, "required": required}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_NUMBER: Schema = {"type": "number"}
_TOP: Schema = {"id": _TEXT, "created": {"type": "integer"}, "model": _TEXT, "usage": _reference("Usage")}
_CHOICE: Schema = {"index": _COUNT, "logprobs": _or_null({"type": "object"}), "token_ids": _list(_COUNT)}
_CALL = _object(
    "A call of a tool.",
    id=_TEXT,
    type={"const": "function"},
    function=_object("What is called.", name=_TEXT, arguments=_TEXT),
)
_RESPONSES: Schema = {
    "ErrorResponse": _object(
        "Something is wrong, and what.",
        error=_object("In OpenAI's form.", message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_TEXT),
    ),
    "Usage": _object(
        "Tokens of the whole request.",
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object("Of the prompt.", cached_tokens=_COUNT),
    ),
    "ChatCompletion": _object(
        "The answer; with `stream`, events of it.",
        object={"const": "chat.completion"},
        choices=_list(
            _object(
                "One of the answers.",
                ("token_ids",),
                finish_reason={"enum": ["stop", "length", "tool_calls"]},
                message=_object(
                    "What the model says.",
                    ("tool_calls", "reasoning_content"),
                    role={"const": "assistant"},
                    content=_or_null(_TEXT),
                    refusal={"type": "null"},
                    reasoning_content=_TEXT,
                    tool_calls=_list(_CALL),
                ),
                **_CHOICE,
            )
        ),
        **_TOP,
    ),
    "Completion": _object(
        "The answer; with `stream`, events of it.",
        object={"const": "text_completion"},
        choices=_list(
            _object(
                "One of the answers.", ("token_ids",), finish_reason={"enum": ["stop", "length"]}, text=_TEXT, **_CHOICE
            )
        ),
        **_TOP,
    ),
    "Model": _object(
        "What this graph serves.",
        id=_TEXT,
        object={"const": "model"},
        created=_COUNT,
        owned_by=_TEXT,
        max_model_len=_COUNT,
    ),
    "Models": _object("What this graph serves.", object={"const": "list"}, data=_list(_reference("Model"))),
    "Status": _object("It is so.", status=_TEXT),
    "Requests": _object(
        "The running ones and the last that ended, newest first.",
        requests=_list(
            _object("One.", id=_TEXT, status=_or_null({"type": "integer"}), seconds=_NUMBER, tokens=_COUNT, key=_TEXT)
        ),
    ),
    "Cancelled": _object("It is being ended, everywhere.", id=_TEXT, cancelled={"const": True}),
    "Timeline": {"type": "object", "description": "What happened to a request."},
    "Tokenizer": {"type": "object", "description": "In the form of the `tokenizers` library."},
    "TokenizerConfig": {
        "type": "object",
        "description": "Special tokens and chat template, as Hugging Face keeps them.",
    },
    "Workers": _object("Those that take requests.", workers=_list({"type": "object"})),
}
_ANSWERS = {
    "/v1/chat/completions": "ChatCompletion",
    "/v1/completions": "Completion",
    "/v1/models": "Models",
    "/v1/models/{name}": "Model",
    "/health": "Status",
    "/ready": "Status",
    "/pdd/requests": "Requests",
    "/pdd/requests/{request_id}": "Timeline",
    "/pdd/tokenizer/tokenizer.json": "Tokenizer",
    "/pdd/tokenizer/tokenizer_config.json": "TokenizerConfig",
    "/pdd/workers": "Workers",
}
