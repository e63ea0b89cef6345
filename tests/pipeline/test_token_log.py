from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd_runtime.errors import EngineError
from pdd_runtime.pipeline.token_log import Entry, Source, TokenLog
from pdd_runtime.plugins.engine import Token


def tokens(*positions: int) -> list[Token]:
    return [Token(position, 100 + position) for position in positions]


def entries(source: Source, *positions: int) -> list[Entry]:
    return [Entry(token, source) for token in tokens(*positions)]


def test_tokens_come_out_in_the_order_of_their_positions() -> None:
    log = TokenLog(10)
    assert log.merge(tokens(10, 11), "prefill") == entries("prefill", 10, 11)
    assert log.merge(tokens(12), "relay") == entries("relay", 12)
    assert log.ids == (110, 111, 112)
    assert [entry.source for entry in log.entries] == ["prefill", "prefill", "relay"]


def test_a_position_is_given_out_once() -> None:
    log = TokenLog(10)
    log.merge(tokens(10, 11), "relay")
    assert log.merge(tokens(10, 11, 12), "main") == entries("main", 12)
    assert log.conflicts == 0
    assert [entry.source for entry in log.entries] == ["relay", "relay", "main"]


def test_of_two_tokens_for_one_position_the_first_stays_and_the_conflict_is_counted() -> None:
    log = TokenLog(10)
    log.merge(tokens(10), "relay")
    assert log.merge([Token(10, 7)], "main") == []
    assert log.conflicts == 1
    assert log.ids == (110,)


def test_a_token_ahead_of_a_gap_waits_for_it() -> None:
    log = TokenLog(10)
    assert log.merge(tokens(12), "main") == []
    assert len(log) == 0
    assert log.merge([Token(12, 7)], "relay") == []
    assert log.conflicts == 1
    assert log.merge(tokens(10, 11), "relay") == [*entries("relay", 10, 11), *entries("main", 12)]


def test_a_position_inside_the_prompt_is_refused() -> None:
    with pytest.raises(EngineError, match="position 9"):
        TokenLog(10).merge(tokens(9), "relay")


@given(st.integers(0, 40), st.randoms(use_true_random=False))
def test_whatever_order_and_repeats_tokens_come_in_each_position_comes_out_once_and_in_order(
    n: int, rng: random.Random
) -> None:
    log = TokenLog(5)
    sent = [5 + i for i in range(n)] + [5 + rng.randrange(n) for _ in range(n)]
    rng.shuffle(sent)
    out: list[Entry] = []
    while sent:
        cut = rng.randint(1, len(sent))
        batch, sent = sent[:cut], sent[cut:]
        out += log.merge(tokens(*batch), rng.choice(["relay", "main"]))
    assert [entry.token for entry in out] == tokens(*range(5, 5 + n))
    assert log.conflicts == 0
