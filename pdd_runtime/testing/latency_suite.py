"""The conformance suite for latency models. Subclass it in your tests and name your class:

```python
class TestMyModel(LatencyConformance):
    plugin = MyModel
```

It is run with the defaults of `MyModel.Config`; override the fixture `model` for other settings.
"""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pdd_runtime.plugins.latency import LatencyModel
from pdd_runtime.testing.purity import watched

NEW = st.integers(1, 16_384)
CONTEXT = st.integers(0, 131_072)
BATCH = st.integers(1, 512)
MEAN = st.floats(0, 131_072)
PROPERTY = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


class LatencyConformance:
    """What every latency model promises."""

    plugin: ClassVar[type[LatencyModel]]

    @pytest.fixture
    def model(self) -> LatencyModel:
        """The model under test."""
        return self.plugin(self.plugin.Config.model_validate({}))

    def test_it_says_in_one_line_where_its_answers_come_from(self, model: LatencyModel) -> None:
        assert isinstance(model.source, str)
        assert model.source.strip()
        assert "\n" not in model.source

    # Pure

    @PROPERTY
    @given(st.lists(st.tuples(NEW, CONTEXT, BATCH, MEAN), min_size=1, max_size=5))
    def test_the_same_question_gets_the_same_answer(
        self, model: LatencyModel, some: list[tuple[int, int, int, float]]
    ) -> None:
        there = [(model.prefill(new, context), model.decode(batch, mean)) for new, context, batch, mean in some]
        back = [(model.prefill(new, context), model.decode(batch, mean)) for new, context, batch, mean in some[::-1]]
        assert there == back[::-1], "its answer depends on what it was asked before"

    def test_another_object_of_the_same_config_says_the_same(self, model: LatencyModel) -> None:
        other = type(model)(model.config)
        assert other.source == model.source
        assert [other.prefill(n, 7 * n) for n in (1, 300, 9000)] == [model.prefill(n, 7 * n) for n in (1, 300, 9000)]
        assert [other.decode(n, 50.5 * n) for n in (1, 30, 400)] == [model.decode(n, 50.5 * n) for n in (1, 30, 400)]

    def test_answering_does_no_io(self, model: LatencyModel) -> None:
        for number in (1, 100, 10_000):
            with watched() as seen:
                model.prefill(number, number)
                model.decode(number, number)
            assert not seen, "a latency model is pure once it is made: read files in its constructor"

    # What it may say

    @PROPERTY
    @given(NEW, CONTEXT, BATCH, MEAN)
    def test_every_pass_takes_time(self, model: LatencyModel, new: int, context: int, batch: int, mean: float) -> None:
        for seconds in (model.prefill(new, context), model.decode(batch, mean)):
            assert isinstance(seconds, float)
            assert math.isfinite(seconds)
            assert seconds > 0

    @PROPERTY
    @given(NEW, NEW, CONTEXT, CONTEXT)
    def test_a_pass_over_more_tokens_is_no_quicker(
        self, model: LatencyModel, new: int, more: int, context: int, behind: int
    ) -> None:
        (new, more), (context, behind) = sorted((new, more)), sorted((context, behind))
        assert _not_less(model.prefill(more, context), model.prefill(new, context))
        assert _not_less(model.prefill(new, behind), model.prefill(new, context))

    @PROPERTY
    @given(BATCH, BATCH, MEAN, MEAN)
    def test_a_step_of_more_or_longer_sequences_is_no_quicker(
        self, model: LatencyModel, batch: int, more: int, context: float, longer: float
    ) -> None:
        (batch, more), (context, longer) = sorted((batch, more)), sorted((context, longer))
        assert _not_less(model.decode(more, context), model.decode(batch, context))
        assert _not_less(model.decode(batch, longer), model.decode(batch, context))


def _not_less(more: float, less: float) -> bool:
    """But for rounding."""
    return more >= less * (1 - 1e-9)
