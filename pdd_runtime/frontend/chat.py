"""/v1/chat/completions: messages in, an assistant's message out."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import xxhash

from pdd_runtime.frontend import reasoning
from pdd_runtime.frontend.calls import LIST_BETWEEN, ArgumentsOnly, BareCalls, reader_for
from pdd_runtime.frontend.calls_or_form import calls_or_form
from pdd_runtime.frontend.choice import Piece
from pdd_runtime.frontend.form import Form, encode
from pdd_runtime.frontend.job import Job, choice_of, sessions_of
from pdd_runtime.frontend.language import Language
from pdd_runtime.frontend.model import ServedModel
from pdd_runtime.frontend.reading import Part, Plain, Reader
from pdd_runtime.frontend.requests import ChatRequest


class ChatForm(Form):
    id_prefix = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def opening(self, index: int) -> bytes:
        return self._event(index, b'"delta":{"role":"assistant","content":""}', None, b"null")

    def delta(self, index: int, piece: Piece) -> bytes:
        if not piece.parts:
            return super().delta(index, piece) if piece.text else self._event(index, self._empty(), piece, b"null")
        first, *others = piece.parts
        events = [self._event(index, self._part(index, first), piece, b"null")]
        silent = Piece("", [])
        events += [self._event(index, self._part(index, part), silent, b"null") for part in others]
        return b"".join(events)

    def _part(self, index: int, part: Part) -> bytes:
        match part.kind:
            case "content":
                return self._content(part.text)
            case "reasoning":
                return b'"delta":{"reasoning_content":' + encode(part.text) + b"}"
            case "call":
                self._calls[index] += 1
                call = self._call(index, self._calls[index] - 1, part.text, "")
                return b'"delta":{"tool_calls":[' + encode({"index": self._calls[index] - 1} | call) + b"]}"
            case "arguments":
                more = {"index": self._calls[index] - 1, "function": {"arguments": part.text}}
                return b'"delta":{"tool_calls":[' + encode(more) + b"]}"

    def _call(self, choice: int, number: int, name: str, arguments: str) -> dict[str, object]:
        id = f"call_{self._request}_{choice}_{number}"
        if self.language.call_style == "mistral":
            id = xxhash.xxh3_64_hexdigest(id.encode())[:9]  # its template takes no other length back
        return {
            "id": id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _content(self, text: str) -> bytes:
        return b'"delta":{"content":' + encode(text) + b"}"

    def _empty(self) -> bytes:
        return b'"delta":{}'

    def _message(self, index: int, piece: Piece) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": piece.text, "refusal": None}
        thought = "".join(text for kind, text in piece.parts if kind == "reasoning")
        if thought:
            message["reasoning_content"] = thought
        calls: list[tuple[str, list[str]]] = []
        for kind, text in piece.parts:
            if kind == "call":
                calls.append((text, []))
            elif kind == "arguments":
                calls[-1][1].append(text)
        if calls:
            message["content"] = piece.text or None
            message["tool_calls"] = [
                self._call(index, number, name, "".join(arguments)) for number, (name, arguments) in enumerate(calls)
            ]
        return {"message": message}

    def _logprobs(self, piece: Piece) -> object:
        content = []
        for token, _ in piece.entries:
            top = [self._entry(other, logprob) for other, logprob in token.top]
            content.append(self._entry(token.id, token.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float | None) -> dict[str, object]:
        return {
            "token": self.language.token_name(token),
            "logprob": logprob,
            "bytes": list(self.language.token_bytes(token)),
        }


async def chat_job(asked: ChatRequest, model: ServedModel, request_id: str) -> Job:
    """Raises `RequestError` where the request does not fit the model."""
    model.check_name(asked.model)
    language, limit = model.language, "max_completion_tokens" if asked.max_completion_tokens else "max_tokens"
    text, new_reader = conversation(asked, language)
    tokens = await language.encode(text, add_special_tokens=False)
    form = ChatForm(
        request_id,
        model.name,
        language,
        logprobs=bool(asked.logprobs),
        token_ids=bool(asked.return_token_ids),
        usage=asked.include_usage,
    )
    room = model.room(
        len(tokens), asked.max_completion_tokens or asked.max_tokens, model.context_length, "messages", limit
    )
    sampling = asked.sampling(language.eos_token_ids, (asked.top_logprobs or 0) if asked.logprobs else None)
    model.check_sampling(asked, sampling)
    if asked.may_call and asked.guide is not None:
        either = calls_or_form(
            asked.usable_tools,
            asked.guide,
            asked.guide_field,
            language,
            parallel=asked.parallel_tool_calls is not False,
        )
        sampling = msgspec.structs.replace(sampling, guide=either)
    sessions = sessions_of(asked, request_id, 0, tokens, room, sampling)
    choices = [choice_of(asked, language, form, reader=new_reader()) for _ in sessions]
    return Job(
        form,
        tuple(sessions),
        tuple(choices),
        bool(asked.stream),
        of_prompt=asked.choices,
        fields=asked.fields(sampling),
    )


def conversation(asked: ChatRequest, language: Language) -> tuple[str, Callable[[], Reader | None]]:
    """The prompt, and what makes a reader of the answer to it; none: the answer is all content."""
    more = dict(asked.chat_template_kwargs or {})
    if asked.guide is not None and language.knows("enable_thinking"):
        more.setdefault("enable_thinking", False)
    tools = [tool.model_dump(exclude_unset=True) for tool in asked.usable_tools]
    text = language.chat([message.for_template() for message in asked.messages], tools, more)
    inside = reasoning.begins_inside(text) if language.thinks else None
    if asked.guide is not None and inside is not None:
        # The form is that of the whole output, so there is no place for reasoning in it.
        text, inside = f"{text.rstrip()}\n\n{reasoning.CLOSE}\n\n" if inside else text, None
    return text, lambda: _reader(asked, language, inside)


def _reader(asked: ChatRequest, language: Language, inside: bool | None) -> Reader | None:
    schemas = {tool.function.name: tool.function.parameters or {} for tool in asked.usable_tools}
    reader: Reader | None = None
    if asked.forced_tool is not None:
        reader = ArgumentsOnly(asked.forced_tool)
    elif asked.tool_choice == "required":
        reader = BareCalls(schemas, LIST_BETWEEN)
    elif schemas:
        reader = reader_for(language.call_style, schemas)
    return reader if inside is None else reasoning.Thinking(reader or Plain(), inside=inside)
