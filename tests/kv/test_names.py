from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdd_runtime.kv import chain, child, seed

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_names_never_drift() -> None:
    """Names are written to disks and compared between versions: a change here breaks both."""
    root = seed("fingerprint", "2x4x8", lora="adapter", salt="tenant")
    assert root.hex() == "e2e47095cb2699f57d0af123f14be19e"
    assert [block.name.hex() for block in chain(root, range(10), 4)] == [
        "7fb5474c19a992df79e51fa95265afb6",
        "7e6f9c8c1b8fa85d38befe591d6cea28",
        "979bea6ede886e2353dcfa8f9c7ecf68",
    ]
    assert child(root, []).hex() == "f7a33cb49b8d4986f33f63d52ebea609"


def test_blocks_say_where_they_stand() -> None:
    root = seed("m", "1x1x1")
    blocks = chain(root, range(10), 4)
    assert [(block.start, block.tokens) for block in blocks] == [(0, 4), (4, 4), (8, 2)]
    assert [block.parent for block in blocks] == [root, blocks[0].name, blocks[1].name]
    assert chain(root, [], 4) == []


@given(TOKENS, TOKENS, st.integers(1, 8))
def test_two_sequences_share_exactly_their_common_blocks(a: list[int], b: list[int], size: int) -> None:
    root = seed("m", "1x1x1")
    same = [x.name == y.name for x, y in zip(chain(root, a, size), chain(root, b, size), strict=False)]
    expected = [a[: i + size] == b[: i + size] for i in range(0, min(len(a), len(b)), size)]
    assert same == expected


@given(TOKENS.filter(bool), st.text(max_size=8), st.text(max_size=8))
def test_two_salts_share_no_name(tokens: list[int], one: str, other: str) -> None:
    if one == other:
        return
    names = [{b.name for b in chain(seed("m", "1x1x1", salt=salt), tokens, 4)} for salt in (one, other)]
    assert not names[0] & names[1]


@given(st.tuples(*[st.text("ab", max_size=3)] * 4), st.tuples(*[st.text("ab", max_size=3)] * 4))
def test_a_seed_keeps_its_parts_apart(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    roots = [seed(fingerprint, spec, lora=lora, salt=salt) for fingerprint, spec, lora, salt in (one, other)]
    assert (roots[0] == roots[1]) == (one == other)
