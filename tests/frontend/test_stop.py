from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd_runtime.frontend.stop import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    stop = StopStrings(stops)
    out = ""
    for piece in pieces:
        found = stop.push(piece)
        out += found.text
        if found.stopped:
            return out, True
    return out + stop.flush(), False


def by_hand(stops: list[str], text: str) -> tuple[str, bool]:
    """Character by character, the definition."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted({c % (len(text) + 1) for c in cuts}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    text=st.text("abcd", max_size=30),
    cuts=st.lists(st.integers(0, 100), max_size=30),
)
def test_where_the_text_is_cut_makes_no_difference(stops: list[str], text: str, cuts: list[int]) -> None:
    assert run(stops, cut(text, cuts)) == by_hand(stops, text)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    text=st.text("abc", max_size=20),
)
def test_only_a_possible_beginning_is_held_back(stops: list[str], text: str) -> None:
    stop = StopStrings(stops)
    sent = ""
    for i, character in enumerate(text):
        found = stop.push(character)
        sent += found.text
        if found.stopped:
            return
        held = text[len(sent) : i + 1]
        assert held == "" or any(s.startswith(held) and s != held for s in stops)
        longer = [s for s in stops for n in range(len(held) + 1, len(s)) if text[: i + 1].endswith(s[:n])]
        assert not longer


@pytest.mark.parametrize("cuts", [[], [2], [2, 3], [1, 2, 3, 4, 5, 6, 7]])
def test_a_stop_string_over_several_tokens_is_cut_off(cuts: list[int]) -> None:
    assert run(["\n\n##"], cut("ab\n\n## c", cuts)) == ("ab", True)


def test_what_looked_like_a_stop_string_comes_out_when_it_is_none() -> None:
    stop = StopStrings(["<end>"])
    assert stop.push("a<en") == ("a", False)
    assert stop.push("ough") == ("<enough", False)
    assert stop.push("<") == ("", False)
    assert stop.flush() == "<"


def test_of_two_stop_strings_the_one_completed_first_decides() -> None:
    assert run(["bcd", "bc"], ["abcd"]) == ("a", True)
    assert run(["abcd", "bc"], ["xabcd"]) == ("xa", True)
    assert run(["abc", "bc"], ["xabc"]) == ("x", True)
