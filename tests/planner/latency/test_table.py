from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pdd_runtime.planner.latency import Grid, Table, TableConfig

DECODE = Grid(tokens=[1, 4], context=[100, 300], seconds=[[0.010, 0.012], [0.013, 0.021]])
PREFILL = Grid(
    tokens=[1, 100, 200],
    context=[0, 1000, 2000],
    seconds=[[0.01, 0.02, 0.03], [0.11, 0.15, 0.19], [0.21, None, None]],
)


def table(prefill: Grid = PREFILL, decode: Grid = DECODE) -> Table:
    return Table(TableConfig(prefill=prefill, decode=decode, origin="a test's figures"))


def test_what_was_measured_is_answered_as_it_was() -> None:
    model = table()
    for new, row in zip(PREFILL.tokens, PREFILL.seconds, strict=True):
        for context, seconds in zip(PREFILL.context, row, strict=True):
            if seconds is not None:
                assert model.prefill(new, context) == pytest.approx(seconds)
    assert model.decode(4, 300) == pytest.approx(0.021)


def test_between_points_it_is_linear_in_both_directions() -> None:
    model = table()
    assert model.decode(1, 200) == pytest.approx(0.011)
    assert model.decode(2, 100) == pytest.approx(0.011)
    assert model.decode(2, 200) == pytest.approx(0.011 + (0.017 - 0.011) / 3)


def test_beyond_the_last_point_it_goes_on() -> None:
    model = table()
    assert model.decode(1, 500) == pytest.approx(0.014)
    assert model.decode(7, 100) == pytest.approx(0.016)
    assert model.prefill(300, 0) == pytest.approx(0.31)
    # Before the first one it stays: nothing is quicker than what was seen.
    assert model.decode(1, 0) == pytest.approx(0.010)


def test_cells_that_were_not_measured_are_worked_out() -> None:
    """1,000 tokens before them add 40 ms to 100 tokens, so 80 ms to 200."""
    assert table().prefill(200, 1000) == pytest.approx(0.21 + 0.08)
    assert table().prefill(200, 2000) == pytest.approx(0.21 + 0.16)


def test_noise_is_averaged_until_nothing_falls() -> None:
    noisy = Grid(tokens=[1, 2], context=[0, 10, 20], seconds=[[0.010, 0.014, 0.012], [0.020, 0.018, 0.030]])
    model = table(prefill=noisy)
    assert [model.prefill(1, context) for context in (0, 10, 20)] == pytest.approx([0.010, 0.013, 0.013])
    assert [model.prefill(2, context) for context in (0, 10, 20)] == pytest.approx([0.019, 0.019, 0.030])


CELLS = st.one_of(st.none(), st.floats(0, 10))


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_more_never_takes_less_whatever_was_measured(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(1, 100), min_size=1, max_size=5, unique=True).map(sorted))
    columns = data.draw(st.lists(st.integers(0, 100), min_size=1, max_size=5, unique=True).map(sorted))
    cells = [
        [data.draw(CELLS if row and column else st.floats(0, 10)) for column in range(len(columns))]
        for row in range(len(rows))
    ]
    grid = Grid(tokens=rows, context=columns, seconds=cells)
    model = table(prefill=grid)
    new, context = data.draw(st.integers(1, 300)), data.draw(st.integers(0, 300))
    more, longer = data.draw(st.integers(new, 400)), data.draw(st.integers(context, 400))
    less = model.prefill(new, context)
    assert less > 0
    assert model.prefill(more, context) >= less * (1 - 1e-9)
    assert model.prefill(new, longer) >= less * (1 - 1e-9)


def test_its_source_says_how_far_it_was_measured() -> None:
    assert table().source == "a test's figures; measured up to 200 new tokens behind 2000, and a batch of 4 at 300"
    alone = Grid(tokens=[1], context=[100], seconds=[[0.01]])
    assert table(decode=alone).source == "a test's figures; measured up to 200 new tokens behind 2000"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"tokens": [4, 1]}, "tokens must ascend"),
        ({"context": [100, 100]}, "context must ascend"),
        ({"seconds": [[0.01, 0.02]]}, "seconds must have 2 rows of 2 cells"),
        ({"seconds": [[0.01, 0.02], [0.03]]}, "seconds must have 2 rows of 2 cells"),
        ({"seconds": [[0.01, None], [0.02, 0.03]]}, "the first row and the first column of seconds must be whole"),
        ({"seconds": [[0.01, 0.02], [None, 0.03]]}, "the first row and the first column of seconds must be whole"),
        ({"seconds": [[0.01, -1], [0.02, 0.03]]}, "greater than or equal to 0"),
        ({"seconds": [[0.01, float("nan")], [0.02, 0.03]]}, "finite"),
        ({"tokens": [0, 1]}, "greater than or equal to 1"),
        ({"tokens": []}, "at least 1 item"),
    ],
)
def test_a_table_that_is_none_is_refused(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Grid.model_validate({**DECODE.model_dump(), **changed})
