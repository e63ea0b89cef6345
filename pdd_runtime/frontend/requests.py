"""What clients may ask, field by field. Unknown fields are ignored; known ones that we cannot honour are refused."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pdd_runtime.errors import RequestError
from pdd_runtime.plugins.engine import Sampling

MAX_PROMPTS = 128
"""Prompts of one completions request."""
MAX_STOPS = 4
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, for /v1/completions only."""

Prompt: TypeAlias = str | tuple[int, ...]


def _stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("a stop is a text that is not empty, or a list of them")
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop texts are allowed")
    return tuple(stops)


def _prompts(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _is_tokens(value):
            return (tuple(value),)
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} prompts are allowed in one request")
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(isinstance(item, list) and item and _is_tokens(item) for item in value):
            return tuple(tuple(item) for item in value)
    raise ValueError("a prompt is a text, a list of texts, a list of token ids, or a list of those, none empty")


def _is_tokens(value: list[Any]) -> bool:
    return all(type(item) is int and item >= 0 for item in value)


def _content(value: object) -> object:
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"only content parts of type 'text' are supported, this one is {kind!r}")
        texts.append(part["text"])
    return "\n".join(texts)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class Message(BaseModel):
    """One turn. What else it holds (`name`, `tool_calls`, …) reaches the chat template as it is."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_content)] = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role '{self.role}' needs content")
        return self

    def for_template(self) -> dict[str, Any]:
        message = self.model_dump(exclude_unset=True)
        if self.role == "developer":
            message["role"] = "system"  # the same thing by its newer name; templates know the old one
        return message


class _Body(BaseModel):
    """What both endpoints share. `null` means the default, as in OpenAI's API."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    model: str | None = None
    """May be left out: a graph serves one model."""
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    """0 and -1: off."""
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    """Go on to max_tokens: for measurements."""
    return_token_ids: bool | None = None
    """Give `token_ids` beside the text of every choice or chunk."""
    cache_salt: str | None = None
    """Requests of different salts share no cached KV."""

    @model_validator(mode="before")
    @classmethod
    def _only_what_we_do(cls, data: object) -> object:
        """A field that would change the answer is refused, not ignored. Raises `RequestError`, which unlike a
        `ValueError` from here can name the field."""
        if isinstance(data, dict):
            for name, neutral in _NOT_YET.items():
                if name in data and data[name] not in (None, *neutral):
                    allowed = " or ".join(repr(value) for value in neutral) or "null"
                    raise RequestError("not supported yet", where=name, fix=f"leave it out, or set it to {allowed}")
        return data

    @model_validator(mode="after")
    def _options_fit(self) -> _Body:
        if self.stream_options is not None and not self.stream:
            raise RequestError("only allowed with 'stream': true", where="stream_options")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, eos_token_ids: tuple[int, ...], logprobs: int | None) -> Sampling:
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            seed=secrets.randbits(64) if self.seed is None else self.seed % 2**64,
            logprobs=logprobs,
            stop_token_ids=() if self.ignore_eos else eos_token_ids,
        )


# Field to the values that leave the answer as it is.
_NOT_YET: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
}


class ChatRequest(_Body):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    """The newer name of max_tokens; it wins."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _logprobs_fit(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("needs 'logprobs': true", where="top_logprobs")
        return self


class CompletionRequest(_Body):
    """POST /v1/completions"""

    prompt: Annotated[tuple[Prompt, ...], BeforeValidator(_prompts)]
    """Every prompt gets a choice of its own, in order."""
    logprobs: int | None = Field(None, ge=0, le=20)
