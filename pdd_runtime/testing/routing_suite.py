"""The conformance suite for routing policies. Subclass it in your tests and name your class:

```python
class TestMyPolicy(RoutingConformance):
    plugin = MyPolicy
```

It is run with the defaults of `MyPolicy.Config`; override the fixture `policy` for other settings, in as
many subclasses as there are settings worth it.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pdd_runtime.errors import NoRoute
from pdd_runtime.plugins.routing import (
    ClusterView,
    EdgeView,
    Finishing,
    RequestFacts,
    Role,
    Route,
    RoutingPolicy,
    WorkerKey,
    WorkerView,
)
from pdd_runtime.testing.purity import watched

ROLES: dict[str, Role] = {
    "prefill-a": "prefill",
    "prefill-b": "prefill",
    "relay-a": "relay",
    "relay-b": "relay",
    "main-a": "main",
    "main-b": "main",
    "whole": "aggregated",
}
"""The pools of the views, by name."""
T = TypeVar("T", bound=msgspec.Struct)
FACTS = RequestFacts(prompt_tokens=1000, max_tokens=100)

# The same examples each time: what passes once passes again. Inherited tests run under several classes.
PROPERTY = settings(
    max_examples=50,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
)


def worker(pool: str, index: int = 0, *, cached: int = 0, running: int = 0, waiting: int = 0) -> WorkerView:
    """A ready worker of one of the `ROLES`."""
    cluster = "dc-b" if ROLES[pool] == "main" else "dc-a"
    return WorkerView(
        key=WorkerKey(pool, index, "epoch"),
        role=ROLES[pool],
        cluster=cluster,
        cached_tokens=cached,
        running=running,
        waiting=waiting,
        batch_limit=16,
    )


def edge(source: str, target: str, carries: Any = "kv", link: str | None = None) -> EdgeView:
    return EdgeView(source=source, target=target, carries=carries, link=link)


PDD = (
    edge("prefill-a", "relay-a"),
    edge("prefill-a", "main-a", link="wan"),
    edge("relay-a", "main-a", "tokens", "wan"),
)
"""One pool of each role, as the quickstart has it."""
EMPTY = ClusterView(workers=(), edges=PDD)


@st.composite
def facts(draw: st.DrawFn) -> RequestFacts:
    return RequestFacts(
        prompt_tokens=draw(st.integers(1, 100_000)),
        max_tokens=draw(st.integers(1, 4096)),
        single=draw(st.booleans()),
    )


@st.composite
def views(draw: st.DrawFn) -> ClusterView:
    """Any graph's workers at any moment: pools that are away, queues, caches, edges that join some and not others."""
    numbers = st.integers(0, 40)
    workers = [
        worker(pool, index, cached=draw(st.integers(0, 120_000)), running=draw(numbers), waiting=draw(numbers))
        for pool in ROLES
        for index in range(draw(st.integers(0, 2)))
    ]
    possible = [
        (source, target, carries)
        for source, target_role, kinds in (
            *((name, role, ("kv",)) for name in ("prefill-a", "prefill-b") for role in ("relay", "main")),
            *((name, "main", ("tokens", "kv")) for name in ("relay-a", "relay-b")),
        )
        for target in ROLES
        if ROLES[target] == target_role
        for carries in kinds
    ]
    chosen = draw(st.lists(st.sampled_from(possible), unique=True, max_size=len(possible)))
    edges = tuple(edge(*ends, draw(st.sampled_from([None, "wan"]))) for ends in chosen)
    finishing = Finishing(
        share=draw(st.floats(0, 1)),
        sessions=draw(st.dictionaries(st.sampled_from(["relay-a/0", "relay-b/1"]), st.integers(0, 16))),
        hit_rate_gaps=draw(st.dictionaries(st.sampled_from(["main-a", "main-b"]), st.floats(-1, 1))),
    )
    return ClusterView(workers=tuple(draw(st.permutations(workers))), edges=edges, finishing=finishing)


class RoutingConformance:
    """What every routing policy promises."""

    plugin: ClassVar[type[RoutingPolicy]]

    @pytest.fixture
    def policy(self) -> RoutingPolicy:
        """The policy under test."""
        return self.plugin(self.plugin.Config.model_validate({}))

    # Pure

    @PROPERTY
    @given(facts(), views())
    def test_the_same_view_gives_the_same_route(
        self, policy: RoutingPolicy, facts: RequestFacts, view: ClusterView
    ) -> None:
        first = _outcome(policy, facts, view)
        again = _outcome(policy, _copy(facts), _copy(view))
        other = _outcome(type(policy)(policy.config), facts, view)
        assert first == again, "asked twice, the policy gave two answers"
        assert first == other, "another object of the same config gave another answer"

    @PROPERTY
    @given(facts(), st.lists(views(), min_size=2, max_size=3))
    def test_no_answer_depends_on_what_was_asked_before(
        self, policy: RoutingPolicy, facts: RequestFacts, some: list[ClusterView]
    ) -> None:
        there = [_outcome(policy, facts, view) for view in some]
        back = [_outcome(policy, facts, view) for view in reversed(some)]
        assert there == back[::-1]

    @PROPERTY
    @given(facts(), views())
    def test_its_input_is_left_as_it_was(self, policy: RoutingPolicy, facts: RequestFacts, view: ClusterView) -> None:
        before = msgspec.json.encode((facts, view, policy.config.model_dump(mode="json")))
        _outcome(policy, facts, view)
        assert msgspec.json.encode((facts, view, policy.config.model_dump(mode="json"))) == before

    def test_planning_does_no_io(self, policy: RoutingPolicy) -> None:
        whole = ClusterView(workers=(worker("prefill-a"), worker("relay-a"), worker("main-a")), edges=PDD)
        for view in (whole, EMPTY):
            _outcome(policy, FACTS, view)
            with watched() as seen:
                _outcome(policy, FACTS, view)
            assert not seen, "a policy is pure: what it needs of the world is in its view and its config"

    # Routes

    @PROPERTY
    @given(facts(), views())
    def test_a_route_takes_ready_workers_along_edges(
        self, policy: RoutingPolicy, facts: RequestFacts, view: ClusterView
    ) -> None:
        route = _outcome(policy, facts, view)
        if isinstance(route, str):
            return
        roles = {each.key: each.role for each in view.workers}
        for key in (route.main, route.prefill, route.relay):
            assert key is None or key in roles, f"{key} is not in the view"
        assert roles[route.main] == ("aggregated" if route.kind == "A" else "main")
        assert (route.prefill is not None) == (route.kind != "A"), f"a route {route.kind} with prefill {route.prefill}"
        assert (route.relay is not None) == ("RLD" in route.kind), f"a route {route.kind}, relay {route.relay}"
        if route.prefill is not None:
            assert roles[route.prefill] == "prefill"
            assert _joined(view, route.prefill, route.main, "kv"), "no edge carries kv from its prefill to its main"
        if route.prefill is not None and route.relay is not None:
            assert roles[route.relay] == "relay"
            assert _joined(view, route.prefill, route.relay, "kv"), "no edge carries kv from its prefill to its relay"
            assert _joined(view, route.relay, route.main, "tokens", "kv"), "no edge leads from its relay to its main"

    @PROPERTY
    @given(facts(), views())
    def test_a_route_has_a_reason_in_one_line(
        self, policy: RoutingPolicy, facts: RequestFacts, view: ClusterView
    ) -> None:
        route = _outcome(policy, facts, view)
        if isinstance(route, Route):
            assert route.reason.strip(), "the timeline shows the reason: there must be one"
            assert len(route.reason.splitlines()) == 1

    @PROPERTY
    @given(facts(), views())
    def test_where_a_whole_route_is_ready_there_is_an_answer_else_no_route(
        self, policy: RoutingPolicy, facts: RequestFacts, view: ClusterView
    ) -> None:
        route = _outcome(policy, facts, view)
        if _has_whole_route(view):
            assert isinstance(route, Route), f"a whole route is ready, and yet: {route}"
        else:
            assert isinstance(route, str), "no whole route is ready, and yet it planned one"

    @pytest.mark.parametrize(
        ("ready", "missing"),
        [
            ((), ("prefill", "main")),
            (("prefill-a", "relay-a"), ("main",)),
            (("relay-a", "main-a"), ("prefill",)),
            (("relay-a",), ("prefill", "main")),
        ],
        ids=["nobody", "no main", "no prefill", "a relay alone"],
    )
    def test_no_route_names_what_is_missing(
        self, policy: RoutingPolicy, ready: tuple[str, ...], missing: tuple[str, ...]
    ) -> None:
        view = ClusterView(workers=tuple(map(worker, ready)), edges=PDD)
        with pytest.raises(NoRoute) as raised:
            policy.plan(FACTS, view)
        for role in missing:
            assert role in raised.value.what, f"the message does not say that {role} is missing"


def _outcome(policy: RoutingPolicy, facts: RequestFacts, view: ClusterView) -> Route | str:
    """The route, or the words of the `NoRoute`."""
    try:
        route = policy.plan(facts, view)
    except NoRoute as error:
        return str(error)
    assert isinstance(route, Route), f"plan returned {route!r}"
    return route


def _copy(value: T) -> T:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))


def _joined(view: ClusterView, source: WorkerKey, target: WorkerKey, *carries: str) -> bool:
    return any((e.source, e.target) == (source.pool, target.pool) and e.carries in carries for e in view.edges)


def _has_whole_route(view: ClusterView) -> bool:
    ready = {each.key.pool for each in view.workers}
    feeds = any(
        e.carries == "kv"
        and ROLES[e.source] == "prefill"
        and ROLES[e.target] == "main"
        and {e.source, e.target} <= ready
        for e in view.edges
    )
    return feeds or any(each.role == "aggregated" for each in view.workers)
