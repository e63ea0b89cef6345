"""The suite finds latency models that break the contract."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from pdd_runtime.plugins.latency import LatencyModel
from tests.testing.outcomes import outcomes


class NoSettings(BaseModel, extra="forbid"):
    """None."""


class Honest(LatencyModel):
    name = "honest"
    Config = NoSettings

    def prefill(self, new: int, context: int) -> float:
        return 1e-3 + 1e-6 * new * (1 + context / 1000)

    def decode(self, batch: int, context: float) -> float:
        return 1e-3 + 1e-6 * batch * (1 + context / 1000)

    @property
    def source(self) -> str:
        return "a test"


class Free(Honest):
    """Takes no time for short passes."""

    def prefill(self, new: int, context: int) -> float:
        return 1e-6 * (new // 100)


class Endless(Honest):
    def decode(self, batch: int, context: float) -> float:
        return float("inf") if batch > 100 else 0.1


class Whole(Honest):
    """Answers in whole seconds."""

    def prefill(self, new: int, context: int) -> float:
        return 1


class Bumpy(Honest):
    """A prompt of many tokens is quicker than one of fewer."""

    def prefill(self, new: int, context: int) -> float:
        return 1e-3 * (1 + new % 4096)


class Forgetful(Honest):
    """Quicker behind a longer context."""

    def decode(self, batch: int, context: float) -> float:
        return 1.0 / (1 + context)


class Tired(Honest):
    """Slower with each question."""

    asked = 0

    def decode(self, batch: int, context: float) -> float:
        self.asked += 1
        return super().decode(batch, context) * self.asked


class Reader(Honest):
    """Looks it up each time."""

    def prefill(self, new: int, context: int) -> float:
        Path("/proc/uptime").read_bytes()
        return super().prefill(new, context)


class Silent(Honest):
    source = ""


class Wordy(Honest):
    source = "a line\nand another"


def test_a_model_that_keeps_the_contract_passes() -> None:
    assert outcomes(Honest).failed == set()


@pytest.mark.parametrize(
    ("cls", "broken"),
    [
        (Free, {"test_every_pass_takes_time"}),
        (Endless, {"test_every_pass_takes_time"}),
        (Whole, {"test_every_pass_takes_time"}),
        (Bumpy, {"test_a_pass_over_more_tokens_is_no_quicker"}),
        (Forgetful, {"test_a_step_of_more_or_longer_sequences_is_no_quicker"}),
        (
            Tired,
            {
                "test_the_same_question_gets_the_same_answer",
                "test_a_step_of_more_or_longer_sequences_is_no_quicker",
            },
        ),
        (Reader, {"test_answering_does_no_io"}),
        (Silent, {"test_it_says_in_one_line_where_its_answers_come_from"}),
        (Wordy, {"test_it_says_in_one_line_where_its_answers_come_from"}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_broken_promise_is_found(cls: type[LatencyModel], broken: set[str]) -> None:
    assert outcomes(cls).failed == broken
