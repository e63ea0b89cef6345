from __future__ import annotations

import pytest
from pydantic import ValidationError

from pdd_runtime.planner.figures import FigureError
from pdd_runtime.planner.hardware import Hardware, known_hardware, machine


@pytest.mark.parametrize(
    ("written", "chips", "nodes"), [("h100", 1, 0.125), ("8xh100", 8, 1), ("4x8xh100", 32, 4), ("16xmi300x", 16, 2)]
)
def test_a_worker_has_so_many_chips(written: str, chips: int, nodes: float) -> None:
    found = machine(written)
    assert (found.chips, found.nodes, found.name) == (chips, nodes, written)
    assert (
        found.memory == chips * known_hardware()[written.rpartition("x")[2] if "mi" not in written else "mi300x"].memory
    )


def test_the_usual_chips_are_known_with_their_source() -> None:
    chips = known_hardware()
    assert {"h100", "h200", "a100", "b200", "l40s", "mi300x", "ascend-910c"} <= set(chips)
    assert all(chip.source for chip in chips.values())
    h100, h200 = chips["h100"], chips["h200"]
    # What sets the two apart is the memory alone.
    assert (h200.compute, h200.interconnect) == (h100.compute, h100.interconnect)
    assert h200.bandwidth / h100.bandwidth == pytest.approx(4.8 / 3.35)
    assert (h100.memory, h200.memory) == (80e9, 141e9)


def test_a_chip_may_be_like_another_but_for_what_it_says() -> None:
    ours = Hardware.model_validate({"like": "h100", "prefill": 0.567, "memory": "96GB"})
    assert (ours.memory, ours.prefill, ours.decode) == (96e9, 0.567, 1.0)
    assert ours.bandwidth == known_hardware()["h100"].bandwidth
    assert machine("2xours", {"ours": ours}).memory == 192e9
    with pytest.raises(ValidationError, match='there is none called "h1000" to be like: did you mean "h100"'):
        Hardware.model_validate({"like": "h1000"})


@pytest.mark.parametrize(
    ("written", "what", "fix"),
    [
        ("8xh10", 'no figures of a chip called "h10" are known', 'did you mean "h100"?'),
        ("cpu", 'no figures of a chip called "cpu" are known', "give the chip's own figures"),
        ("0xh100", '"0xh100" has no chips', "write it like 8xh100"),
        ("8 h100", '"8 h100" is no hardware', "write it like h100, 8xh100 or 4x8xh100"),
        ("", '"" is no hardware', "write it like h100, 8xh100 or 4x8xh100"),
    ],
)
def test_what_is_no_hardware_is_told_with_what_is(written: str, what: str, fix: str) -> None:
    with pytest.raises(FigureError) as caught:
        machine(written)
    assert (caught.value.what, caught.value.fix) == (what, fix)


@pytest.mark.parametrize("changed", [{"memory": "0GB"}, {"bandwidth": "3.35"}, {"compute": "1GHz"}, {"chips": 8}])
def test_figures_have_units_and_are_checked(changed: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Hardware.model_validate({"like": "h100", **changed})
