"""What one request needs done: its sessions, the choices they become, and the form of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from pdd_runtime.errors import RequestError
from pdd_runtime.frontend.choice import Choice, Piece
from pdd_runtime.frontend.form import Form, PromptDetails, Usage
from pdd_runtime.frontend.language import Language
from pdd_runtime.frontend.reading import Reader
from pdd_runtime.frontend.requests import Body, seed_of
from pdd_runtime.pipeline import SessionRequest
from pdd_runtime.plugins.engine import Sampling


class Job(NamedTuple):
    """`sessions[i]` becomes `choices[i]`. Every `of_prompt` sessions that follow each other have the same prompt."""

    form: Form
    sessions: tuple[SessionRequest, ...]
    choices: tuple[Choice, ...]
    stream: bool
    of_prompt: int = 1
    fields: Mapping[str, str] = {}
    """What workers call by their own names, to the request's field that asked for it."""

    def leader(self, index: int) -> int:
        """The first session of the same prompt: the others wait for its first token, and find the prompt cached."""
        return index - index % self.of_prompt

    def usage(self) -> Usage:
        """So far; the truth once every session has ended. A prompt counts once, however many choices it has, and as
        cached is what was so before this request came."""
        firsts = range(0, len(self.sessions), self.of_prompt)
        prompt = sum(len(self.sessions[first].tokens) for first in firsts)
        completion = sum(choice.tokens for choice in self.choices)
        cached = sum(self.choices[first].cached_tokens for first in firsts)
        return Usage(prompt, completion, prompt + completion, PromptDetails(cached))

    def in_fields(self, error: RequestError) -> RequestError:
        """A worker's refusal, as the field it is about."""
        field = self.fields.get(error.where)
        if not error.where or error.where.startswith("request "):
            field = next((field for name, field in self.fields.items() if name in error.what), "")
        return error if field is None else type(error)(error.what, where=field, why=error.why, fix=error.fix)


def sessions_of(
    asked: Body, request_id: str, first: int, tokens: tuple[int, ...], max_tokens: int, sampling: Sampling
) -> list[SessionRequest]:
    """One for each choice of a prompt; `first`: how many other prompts' sessions stand before them. They differ in
    their seeds. Raises `RequestError` where more tokens are demanded than there is room for."""
    if sampling.min_tokens > max_tokens:
        raise RequestError(f"{sampling.min_tokens} is more than the {max_tokens} that are allowed", where="min_tokens")
    # The first of all keeps the request's id, so that the header leads to a timeline.
    ids = [f"{request_id}-{i}" if i else request_id for i in range(first, first + asked.choices)]
    return [
        SessionRequest(
            id=id,
            tokens=tokens,
            max_tokens=max_tokens,
            sampling=msgspec.structs.replace(sampling, seed=seed_of(sampling.seed, i)),
            seeded=asked.seed is not None,
            salt=asked.cache_salt or "",
            priority=asked.priority or 0,
            single=bool(asked.single),
            beside=ids[0] if i else "",
        )
        for i, id in enumerate(ids)
    ]


def choice_of(
    asked: Body, language: Language, form: Form, *, reader: Reader | None = None, echo: Piece | None = None
) -> Choice:
    return Choice(
        language,
        asked.stop or (),
        entries=form.wants_entries,
        reader=reader,
        stop_token_ids=asked.stop_token_ids or (),
        min_tokens=asked.min_tokens or 0,
        echo=echo,
    )
