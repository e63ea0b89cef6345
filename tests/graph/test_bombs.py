"""Texts that are small and would take much: each is refused by an error that says why."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from pdd_runtime.errors import GraphError
from pdd_runtime.graph import load, loads


def _aliases(ten: str) -> str:
    """Each of twelve values is nine times the one before."""
    values = [f"v{number}: &v{number} {ten.format(','.join([f'*v{number - 1}'] * 9))}\n" for number in range(1, 13)]
    return "v0: &v0 {k: 1}\n" + "".join(values)


BOMBS = {
    "open lists": ("a: " + "[" * 50_000, "nested too deeply"),
    "lists": ("a: " + "[" * 200 + "]" * 200, "nested too deeply"),
    "mappings": ("\n".join("  " * depth + "a:" for depth in range(500)), "nested too deeply"),
    "questions": ("? " * 300_000, "nested too deeply"),
    "a billion laughs": (_aliases("[{}]"), "too many values"),
    "a billion merges": (_aliases("{{<<: [{}]}}"), "too many values"),
    "a list of itself": ("a: &a [*a]", "nested too deeply"),
    "a chain of merges": (
        "a0: &a0 {k: 1}\n" + "".join(f"a{n}: &a{n} {{<<: *a{n - 1}}}\n" for n in range(1, 100)),
        "<< is nested too deeply",
    ),
    "a long number": ("a: " + "9" * 500_000, "cannot be read"),
    "a long hexadecimal number": ("a: 0x" + "f" * 500_000, "2000000 bits"),
    "a long binary number": ("a: -0b" + "1" * 65, "65 bits"),
    "many documents": ("---\n" * 100_000, "not valid YAML"),
    "nothing but a comment": ("#" * 500_000, "empty"),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_it_is_refused(bomb: str) -> None:
    text, why = BOMBS[bomb]
    with pytest.raises(GraphError, match=why):
        loads(text)


def test_as_the_value_of_an_override_as_well(pdd: str) -> None:
    for value in ("[" * 1000, "0x" + "f" * 5000, "&a [*a]"):
        with pytest.raises(GraphError, match=r"^--set spec\.slo="):
            loads(pdd, [f"spec.slo={value}"])


def test_of_a_huge_file_no_more_is_read_than_a_graph_may_have(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(100 << 20)
    tracemalloc.start()
    with pytest.raises(GraphError, match="too large for a graph"):
        load(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20
