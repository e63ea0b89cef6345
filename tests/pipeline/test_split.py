"""Who gets which variant."""

from __future__ import annotations

import pytest

from pdd_runtime.pipeline.split import Split

KEYS = [f"user {number}" for number in range(20_000)]


def test_each_variant_gets_its_weight() -> None:
    split = Split({"a": 6, "b": 3, "c": 1, "none": 0})
    counts = {name: sum(split.of(key) == name for key in KEYS) / len(KEYS) for name in split.weights}
    assert counts["a"] == pytest.approx(0.6, abs=0.02)
    assert counts["b"] == pytest.approx(0.3, abs=0.02)
    assert counts["c"] == pytest.approx(0.1, abs=0.02)
    assert counts["none"] == 0
    assert split.share("a") == 0.6


def test_who_knows_the_weights_says_the_same_in_whatever_order() -> None:
    one, other = Split({"a": 2, "b": 1}, "s"), Split({"b": 1, "a": 2}, "s")
    assert [one.of(key) for key in KEYS[:2000]] == [other.of(key) for key in KEYS[:2000]]


def test_another_salt_splits_otherwise() -> None:
    one, other = Split({"a": 1, "b": 1}), Split({"a": 1, "b": 1}, "again")
    same = sum(one.of(key) == other.of(key) for key in KEYS) / len(KEYS)
    assert same == pytest.approx(0.5, abs=0.02)


def test_a_larger_weight_moves_keys_to_it_and_none_between_others() -> None:
    before, after = Split({"a": 8, "b": 1, "c": 1}), Split({"a": 8, "b": 2, "c": 1})
    moves = [(before.of(key), after.of(key)) for key in KEYS]
    moved = [(old, new) for old, new in moves if old != new]
    assert {new for _, new in moved} == {"b"}
    # From 1 of 10 to 2 of 11.
    assert len(moved) / len(KEYS) == pytest.approx(2 / 11 - 1 / 10, abs=0.01)


def test_who_loses_its_variant_is_the_only_one_that_moves() -> None:
    before, after = Split({"a": 1, "b": 1, "c": 1}), Split({"a": 1, "b": 1, "c": 0})
    assert all(before.of(key) in ("c", after.of(key)) for key in KEYS)


def test_without_weights_there_is_no_split() -> None:
    with pytest.raises(ValueError, match="weight"):
        Split({"a": 0})
