"""The model this graph serves, and what it can take."""

from __future__ import annotations

from pdd_runtime.errors import RequestError
from pdd_runtime.frontend.errors import ContextTooLongError, UnknownModelError
from pdd_runtime.frontend.language import Language
from pdd_runtime.frontend.requests import Prompt
from pdd_runtime.plugins.engine import EngineInfo


class ServedModel:
    def __init__(self, info: EngineInfo, language: Language) -> None:
        self.info, self.language = info, language
        self.name, self.context_length = info.model, info.context_length

    def check(self, name: str | None, logprobs: str | None) -> None:
        """Raises where the request means another model, or wants logprobs (by its field's name) that this
        engine does not give."""
        if name is not None and name != self.name:
            raise UnknownModelError(
                f"there is no model {name!r}", where="model", why=f"this graph serves {self.name!r}"
            )
        if logprobs is not None and not self.info.capabilities.logprobs:
            raise RequestError("the engine of this graph gives no logprobs", where=logprobs)

    def check_name(self, name: str) -> None:
        if name != self.name:
            why = f"this graph serves {self.name!r}"
            raise UnknownModelError(f"there is no model {name!r}", where="model", why=why)

    async def tokens(self, prompt: Prompt) -> tuple[int, ...]:
        """A plain prompt's tokens; token ids are taken as they are."""
        if isinstance(prompt, str):
            return await self.language.encode(prompt, add_special_tokens=True)
        if max(prompt, default=0) >= self.language.vocabulary_size:
            raise RequestError(
                f"there is no token {max(prompt)}",
                where="prompt",
                why=f"the vocabulary has {self.language.vocabulary_size}",
            )
        return prompt

    def room(self, prompt_tokens: int, asked: int | None, default: int, field: str) -> int:
        """How many tokens the answer may have: what was asked, else the default as far as the context goes.

        Raises `RequestError` for an empty prompt, and where prompt and answer do not fit the context.
        """
        if prompt_tokens == 0:
            raise RequestError("the prompt is empty", where=field, why="it has no tokens to go on from")
        left = self.context_length - prompt_tokens
        if left < 1 or (asked is not None and asked > left):
            wanted = f" and {asked} more are asked for" if asked is not None else ""
            raise ContextTooLongError(
                f"the prompt has {prompt_tokens} tokens{wanted}; the context of {self.name} is {self.context_length}",
                where=field if left < 1 else "max_tokens",
                fix="shorten the prompt" if left < 1 else f"ask for at most {left}",
            )
        return min(default, left) if asked is None else asked
