"""What one request needs done: its sessions, the choices they become, and the form of the answer."""

from __future__ import annotations

from typing import NamedTuple

from pdd_runtime.frontend.choice import Choice
from pdd_runtime.frontend.form import Form, PromptDetails, Usage
from pdd_runtime.pipeline import SessionRequest


class Job(NamedTuple):
    """`sessions[i]` becomes `choices[i]`."""

    form: Form
    sessions: tuple[SessionRequest, ...]
    choices: tuple[Choice, ...]
    stream: bool

    @property
    def finished(self) -> bool:
        return all(choice.complete for choice in self.choices)

    def usage(self) -> Usage:
        """So far; the truth once every choice is complete."""
        prompt = sum(len(session.tokens) for session in self.sessions)
        completion = sum(choice.tokens for choice in self.choices)
        cached = sum(choice.cached_tokens for choice in self.choices)
        return Usage(prompt, completion, prompt + completion, PromptDetails(cached))
