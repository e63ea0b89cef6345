from __future__ import annotations

from pdd_runtime.planner.traces.chains import Chains


def test_what_is_new_becomes_a_chain_and_what_was_seen_is_led_back_to_where_it_was() -> None:
    chains = Chains(10)
    assert chains.spans(["a", "b", "c"], 28, 0) == ((0, 28),)
    assert chains.spans(["a", "b", "x"], 25, 1) == ((0, 20), (1, 5))
    assert chains.spans(["a", "y"], 20, 2) == ((0, 10), (2, 10))
    assert chains.spans(["a", "y", "z", "w"], 40, 3) == ((0, 10), (2, 10), (3, 20))
    assert chains.spans(["a", "y", "z", "w"], 40, 4) == ((0, 10), (2, 10), (3, 19), (4, 1))


def test_tokens_behind_the_last_whole_block_are_nobody_elses() -> None:
    chains = Chains(10)
    assert chains.spans(["a"], 17, 0) == ((0, 17),)
    assert chains.spans(["a", "b"], 27, 1) == ((0, 10), (1, 17))
    assert chains.spans(["a", "b", "c"], 35, 2) == ((0, 10), (1, 10), (2, 15))


def test_a_last_block_that_is_not_whole_is_known_as_far_as_it_goes() -> None:
    chains = Chains(10)
    chains.spans(["a", "b"], 14, 0)
    assert chains.spans(["a", "b"], 18, 1) == ((0, 14), (1, 4))
    assert chains.spans(["a", "b"], 12, 2) == ((0, 11), (2, 1))


def test_ids_beyond_the_prompt_and_none_at_all_do_no_harm() -> None:
    chains = Chains(10)
    chains.spans(["a", "b", "c"], 30, 0)
    assert chains.spans(["a", "b", "c"], 20, 1) == ((0, 19), (1, 1))
    assert chains.spans([], 7, 2) == ((2, 7),)
    assert chains.spans(["a"], 1, 3) == ((3, 1),)
