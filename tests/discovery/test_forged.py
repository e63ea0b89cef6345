"""Whoever may write to etcd may write anything: no process takes it for one of the graph's, or ends of it."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd_runtime.discovery.etcd.client import Entry
from pdd_runtime.discovery.etcd.mirror import Mirror, Record
from pdd_runtime.plugins.discovery import GraphMark, Member
from pdd_runtime.plugins.routing import WorkerKey

SHARED = {
    "pools": {"main": {"role": "main", "cluster": "dc-b"}, "relay": {"role": "relay", "cluster": "dc-a"}},
    "frontend": {"cluster": "dc-a"},
}
MARK = GraphMark(name="g", digest="d1", shared=SHARED)
MAIN = Member(
    key=WorkerKey("main", 0, "epoch-1"),
    role="main",
    cluster="dc-b",
    state="ready",
    pid=1,
    endpoint="10.0.0.1:7000",
)
WHOLE = Record(MAIN, 1.0, "d1")


def mirror() -> Mirror:
    made = Mirror("/pdd", MARK)
    made.apply([Entry(made.key(("main", 0)), msgspec.json.encode(WHOLE), 1)])
    assert made.members() == (MAIN,)
    return made


def put(made: Mirror, key: bytes, value: bytes) -> None:
    made.apply([Entry(made.root + key, value, 2)])


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"role": "prefill"}, "it is prefill in dc-b, and the graph has main in dc-b"),
        ({"cluster": "dc-a"}, "it is main in dc-a, and the graph has main in dc-b"),
        ({"endpoint": "x" * 10_000}, "a name of 10000 characters"),
        ({"transports": {"tcp": "x" * 10_000}}, "a name of 10000 characters"),
        ({"key": WorkerKey("main", 0, "e" * 1000)}, "a name of 1000 characters"),
    ],
)
def test_a_member_that_the_graph_does_not_have_is_not_shown(
    change: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = mirror()
    forged = msgspec.structs.replace(WHOLE, member=msgspec.structs.replace(MAIN, **change))
    put(made, b"members/main/0", msgspec.json.encode(forged))
    assert made.members() == ()
    assert f"member main/0 is forged: {why}" in caplog.text


def test_a_pool_that_there_is_not_has_no_member(caplog: pytest.LogCaptureFixture) -> None:
    made = mirror()
    other = msgspec.structs.replace(MAIN, key=WorkerKey("mine", 0, "epoch-1"))
    put(made, b"members/mine/0", msgspec.json.encode(msgspec.structs.replace(WHOLE, member=other)))
    assert made.members() == (MAIN,)
    assert "the graph has no such pool" in caplog.text


def test_nobody_begins_so_late_that_nobody_could_follow() -> None:
    made = mirror()
    for born, shown in ((1e300, ()), (time.time() + 60, (MAIN,))):
        put(made, b"members/main/0", msgspec.json.encode(msgspec.structs.replace(WHOLE, born=born)))
        assert made.members() == shown


@pytest.mark.parametrize(
    "value",
    [b"[" * 100_000, b'{"a":' + b"[" * 100_000, b"\xff" * 100, b"", b"1" * 100_000, b'"' + b"x" * (2 << 20) + b'"'],
    ids=["nested", "nested in a mapping", "no text", "empty", "a long number", "2 MB"],
)
@pytest.mark.parametrize("key", [b"members/main/1", b"graphs/d2"])
def test_what_is_no_value_of_ours_is_told_and_left_out(
    key: bytes, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    made = mirror()
    put(made, key, value)
    assert made.members() == (MAIN,)
    assert made.graphs == {}
    assert "is none: " in caplog.text


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_fields = [*msgspec.to_builtins(WHOLE)["member"], "born", "graph"]


@given(st.dictionaries(st.sampled_from(_fields), _json, max_size=3), st.binary(max_size=30))
def test_any_value_leaves_the_others_as_they_are(changes: dict[str, Any], key: bytes) -> None:
    made = mirror()
    record = msgspec.to_builtins(WHOLE)
    for name, value in changes.items():
        (record if name in ("born", "graph") else record["member"])[name] = value
    encoded = msgspec.json.encode(record)
    put(made, b"members/relay/0", encoded)
    put(made, b"graphs/" + key, encoded)
    put(made, key, encoded)
    put(made, b"members/" + key, key)
    assert MAIN in made.members()
    assert all(member.key.pool in SHARED["pools"] for member in made.members())
