"""Frames of every kind, for hypothesis."""

from __future__ import annotations

from hypothesis import strategies as st

from pdd_runtime.rpc.frames import Bye, Call, Cancel, Credit, End, Failure, Hello, Item, Ping, Result, pack
from pdd_runtime.rpc.greeting import Greeting

ids = st.integers(0, 2**63)
payloads = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
).map(pack)
frames = st.one_of(
    st.builds(Call, ids, st.text(), payloads, st.none() | st.floats(0, 1e9), st.booleans()),
    st.builds(Result, ids, payloads),
    st.builds(Item, ids, payloads),
    st.builds(End, ids),
    st.builds(Failure, ids, st.dictionaries(st.text(), st.text())),
    st.builds(Credit, ids, ids),
    st.builds(Cancel, ids),
    st.builds(Ping),
    st.builds(Bye, st.none() | st.dictionaries(st.text(), st.text())),
    st.builds(
        lambda a, b: Hello(Greeting(graph=a, secret=b, cluster=a, name=b)), st.text(max_size=99), st.text(max_size=99)
    ),
)
