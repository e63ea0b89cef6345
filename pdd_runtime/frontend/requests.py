"""What clients may ask, field by field. Unknown fields are ignored; known ones that we cannot honour are refused."""

from __future__ import annotations

import secrets
from functools import cached_property
from typing import Any, ClassVar

import xxhash
from pydantic import BaseModel, ConfigDict, Field, model_validator

from pdd_runtime.errors import RequestError
from pdd_runtime.frontend.fields import MAX_CHOICES, LogitBias, Prompts, Stops, TokenIds, ToolChoice
from pdd_runtime.frontend.guides import Choices, Filled, ResponseFormat, Schema, StructuredOutputs, encoded, guides
from pdd_runtime.frontend.messages import MAX_MESSAGES, Message
from pdd_runtime.frontend.tools import MAX_TOOLS, ChosenTool, Tool, arguments_of, one_of
from pdd_runtime.frontend.unknown import unknown_fields
from pdd_runtime.plugins.engine import Guide, Sampling

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, for /v1/completions only."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class Body(BaseModel):
    """What both endpoints share. `null` means the default, as in OpenAI's API."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)

    model: str | None = None
    """May be left out: a graph serves one model."""
    max_tokens: int | None = Field(None, ge=1)
    """Of the answer."""
    min_tokens: int | None = Field(None, ge=0)
    """Nothing ends the answer before so many tokens."""
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    """Choices for each prompt."""
    temperature: float | None = Field(None, ge=0, le=2)
    """0 is greedy."""
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    """0 and -1: off."""
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    """1: none."""
    logit_bias: LogitBias = None
    """From token ids to what is added to their logits."""
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Stops = None
    """Texts before which the answer ends."""
    stop_token_ids: TokenIds | None = None
    """Tokens that end the answer beside the model's own."""
    ignore_eos: bool | None = None
    """Go on to max_tokens: for measurements."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: Filled | None = None
    guided_choice: Choices | None = None
    guided_grammar: Filled | None = None
    """A Lark grammar."""
    return_token_ids: bool | None = None
    """Give `token_ids` beside the text of every choice or chunk."""
    cache_salt: str | None = None
    """Requests of different salts share no cached KV."""
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    """Lower ones are admitted earlier. 0, where the API key says nothing else."""
    single: bool | None = None
    """Nothing will build on this: where the graph lets such requests, they end on the relay."""
    timeout: float | None = Field(None, gt=0)
    """Seconds from its arrival after which the request is cancelled, where the graph does not do so before."""
    user: str | None = None
    """Where the graph has variants that go by it, all of a user's requests have the same."""
    strict: bool | None = None
    """Refuse the request where it has fields that would be ignored."""

    refused: ClassVar[dict[str, tuple[object, ...]]] = {
        "best_of": (1,),
        "use_beam_search": (False,),
        "prompt_logprobs": (False,),
    }
    """Fields that would change the answer, to the values that leave it as it is."""

    @model_validator(mode="before")
    @classmethod
    def _only_what_we_do(cls, data: object) -> object:
        """A field that would change the answer is refused, not ignored. Raises `RequestError`, which unlike a
        `ValueError` from here can name the field."""
        if not isinstance(data, dict):
            return data
        for name, neutral in cls.refused.items():
            if name in data and data[name] not in (None, *neutral):
                allowed = " or ".join(repr(value) for value in neutral) or "null"
                raise RequestError("not supported", where=name, fix=f"leave it out, or set it to {allowed}")
        if data.get("strict") is True and (unknown := unknown_fields(cls, data)):
            raise RequestError(
                f"unknown fields: {', '.join(unknown)}",
                where=unknown[0],
                why="the request is strict, so nothing in it is ignored",
                fix="leave them out, or 'strict'",
            )
        return data

    @model_validator(mode="after")
    def _options_fit(self) -> Body:
        if self.stream_options is not None and not self.stream:
            raise RequestError("only allowed with 'stream': true", where="stream_options")
        if self.guide is not None and self.ignore_eos:
            raise RequestError("an answer of a given form ends where the form does", where="ignore_eos")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def choices(self) -> int:
        """For each prompt."""
        return self.n or 1

    @cached_property
    def guide(self) -> Guide | None:
        """The form that the answer must have. Raises `RequestError` where two are asked for."""
        found = self._guides()
        if len(found) > 1:
            names = ", ".join(field for field, _ in found)
            raise RequestError(f"only one form can be asked for, not {names}", where=found[-1][0])
        return found[0][1] if found else None

    @cached_property
    def guide_field(self) -> str:
        """The field that asks for a form; empty where none does."""
        return next((field for field, _ in self._guides()), "")

    def _guides(self) -> list[tuple[str, Guide]]:
        found: list[tuple[str, Guide]] = []
        if self.response_format is not None and (guide := self.response_format.guide()) is not None:
            found.append(("response_format", guide))
        if self.structured_outputs is not None:
            found += [("structured_outputs", guide) for guide in self.structured_outputs.guides()]
        for field, guides_of_it in (
            ("guided_json", guides(self.guided_json, None, None, None)),
            ("guided_regex", guides(None, self.guided_regex, None, None)),
            ("guided_choice", guides(None, None, self.guided_choice, None)),
            ("guided_grammar", guides(None, None, None, self.guided_grammar)),
        ):
            found += [(field, guide) for guide in guides_of_it]
        return found

    def fields(self, sampling: Sampling) -> dict[str, str]:
        """What drivers and engines call by their own names, to the field that asks for it."""
        neutral = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
        penalty = next((name for name, none in neutral.items() if getattr(self, name) not in (None, none)), "")
        fields = {"penalties": penalty, "guided": self.guide_field}
        found = {capability: fields.get(capability, capability) for capability in sampling.needs}
        if sampling.guide is not None:
            found |= dict.fromkeys(("response_format", "guide", sampling.guide.kind), self.guide_field)
        return found

    def sampling(self, eos_token_ids: tuple[int, ...], logprobs: int | None) -> Sampling:
        """Of the first choice; see `seeded` for the others."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            seed=secrets.randbits(64) if self.seed is None else self.seed % 2**64,
            logprobs=logprobs,
            stop_token_ids=(*(() if self.ignore_eos else eos_token_ids), *(self.stop_token_ids or ())),
            min_tokens=self.min_tokens or 0,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self.logit_bias or (),
            guide=self.guide,
        )


def seed_of(seed: int, choice: int) -> int:
    """The seed of one of several choices: the first has the request's own, so it is the answer that `n` = 1 gives."""
    if choice == 0:
        return seed
    return xxhash.xxh3_64_intdigest(seed.to_bytes(8, "little") + choice.to_bytes(4, "little"))


class ChatRequest(Body):
    """POST /v1/chat/completions"""

    refused = Body.refused | {
        "echo": (False,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"],),
        "continue_final_message": (False,),
        "add_generation_prompt": (True,),
    }

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1)
    """The newer name of max_tokens; it wins."""
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoice = None
    """auto, where there are tools."""
    parallel_tool_calls: bool | None = None
    """false: a forced answer has one call. The model's own choice is not bounded."""
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the chat template, as enable_thinking."""

    @model_validator(mode="after")
    def _chat_fits(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("needs 'logprobs': true", where="top_logprobs")
        for name in ("messages", "tools", "add_generation_prompt"):
            if name in (self.chat_template_kwargs or {}):
                raise RequestError(f"{name} is not for the client to set", where="chat_template_kwargs")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise RequestError(f"several tools are called {twice[0]!r}", where="tools")
        if self.tool_choice in (None, "none"):
            pass
        elif not names and self.tool_choice != "auto":
            raise RequestError("there are no tools to call", where="tool_choice", fix="give 'tools'")
        elif isinstance(self.tool_choice, ChosenTool) and self.tool_choice.function.name not in names:
            raise RequestError(
                f"there is no tool {self.tool_choice.function.name!r}",
                where="tool_choice",
                why=f"the tools are {', '.join(names)}",
            )
        if self.may_call and self.guide is not None and self.guide.kind not in ("json_schema", "json_object"):
            raise RequestError(
                f"an answer that may call tools can be given no {self.guide.kind}, only a JSON Schema",
                where=self.guide_field,
                fix="set 'tool_choice' to 'none', or leave one of the two out",
            )

    @property
    def usable_tools(self) -> list[Tool]:
        """Those that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def may_call(self) -> bool:
        """There are tools, and whether to call one is the model's choice."""
        return bool(self.tools) and self.tool_choice in (None, "auto")

    @property
    def forced_tool(self) -> str | None:
        """The one that must be called."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, ChosenTool) else None

    def _guides(self) -> list[tuple[str, Guide]]:
        found = super()._guides()
        if not self.tools or self.tool_choice in (None, "none", "auto"):
            return found
        forced = [tool for tool in self.tools if tool.function.name == self.forced_tool]
        schema = (
            arguments_of(forced[0]) if forced else one_of(self.tools, parallel=self.parallel_tool_calls is not False)
        )
        # Where a call must come there is no answer that could have OpenAI's form.
        others = [guide for guide in found if guide[0] != "response_format"]
        return [("tool_choice", Guide(kind="json_schema", text=encoded(schema))), *others]


class CompletionRequest(Body):
    """POST /v1/completions"""

    refused = Body.refused | {"suffix": ("",)}

    prompt: Prompts
    """Every prompt gets choices of its own, in order."""
    echo: bool | None = None
    """The answer begins with the prompt."""
    logprobs: int | None = Field(None, ge=0, le=20)

    @model_validator(mode="after")
    def _not_too_many(self) -> CompletionRequest:
        if len(self.prompt) * self.choices > MAX_CHOICES:
            raise RequestError(f"{len(self.prompt)} prompts have at most {MAX_CHOICES} choices in all", where="n")
        return self
