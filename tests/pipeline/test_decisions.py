"""What was decided about variants, and for how long that holds."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

import pytest

from pdd_runtime.errors import LaunchError
from pdd_runtime.graph import Graph, loads
from pdd_runtime.pipeline.decisions import KEPT, Decision, Journal, Kind, digest, standing, telling, weights

TEXT = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: decisions}
spec:
  model: {source: toy}
  clusters: {dc: {}}
  pools:
    a: {role: aggregated, cluster: dc, engine: {plugin: scripted}}
  variants: {a: {weight: 2}, b: {weight: 1}, c: {weight: 1}}
"""


def graph(*overrides: str) -> Graph:
    return loads(TEXT, list(overrides)).graph


def decided(kind: Kind, variant: str, of: Graph | None = None, at: float = 0.0) -> Decision:
    return Decision(kind=kind, variant=variant, by="test", at=at, of=digest(of or graph(), kind, variant))


@pytest.mark.parametrize(
    ("decisions", "expected"),
    [
        ([], [2, 1, 1]),
        ([decided("abort", "b")], [2, 0, 1]),
        ([decided("rollback", "b"), decided("abort", "c")], [2, 0, 0]),
        ([decided("promote", "c")], [0, 0, 1]),
        ([decided("abort", "b"), decided("promote", "b")], [0, 1, 0]),
        ([decided("promote", "b"), decided("rollback", "b")], [2, 0, 1]),
        ([decided("abort", "b"), decided("resume", "b")], [2, 1, 1]),
        ([decided("promote", "c"), decided("resume", "c")], [2, 1, 1]),
    ],
)
def test_what_each_decision_does(decisions: list[Decision], expected: list[float]) -> None:
    assert list(weights(graph(), decisions).values()) == expected


def test_where_nobody_else_has_any_the_control_has_all() -> None:
    of = graph("spec.variants.a.weight=0", "spec.variants.c.weight=0")
    assert weights(of, [decided("rollback", "b", of)]) == {"a": 1.0, "b": 0.0, "c": 0.0}


def test_a_rollback_holds_as_long_as_the_file_says_the_same_of_that_variant() -> None:
    rollback = [decided("rollback", "b")]
    for same in ("spec.variants.a.weight=5", "spec.variants.d={}", "spec.admission.queue=3"):
        assert standing(graph(same), rollback).keys() == {"b"}
    for other in ("spec.variants.b.weight=2", "spec.variants.b.routing={plugin: never-relay}"):
        assert standing(graph(other), rollback) == {}


def test_a_promotion_holds_as_long_as_the_file_says_the_same_of_all_variants() -> None:
    promotion = [decided("promote", "b")]
    assert standing(graph("spec.admission.queue=3"), promotion).keys() == {"b"}
    assert standing(graph("spec.variants.d={}"), promotion) == {}


def always(*decisions: Decision) -> Callable[[tuple[Decision, ...]], Iterable[Decision]]:
    return lambda before: decisions


def test_decisions_outlive_their_process_and_are_seen_by_others(tmp_path: Path) -> None:
    path = tmp_path / "variants.json"
    one, other = Journal(path), Journal(path)
    assert not other.look()
    one.add(always(decided("abort", "b")))
    assert path.stat().st_mode & 0o777 == 0o600
    assert other.look()
    assert not other.look()
    assert other.decisions == one.decisions
    # Who adds one has seen those of others.
    other.add(always(decided("abort", "c")))
    assert one.add(lambda before: [decided("resume", each.variant) for each in before]) == (
        decided("resume", "b"),
        decided("resume", "c"),
    )
    fresh = Journal(path)
    fresh.look()
    assert [each.kind for each in fresh.decisions] == ["abort", "abort", "resume", "resume"]


def test_old_decisions_are_forgotten_but_for_the_last_of_each_variant() -> None:
    journal = Journal()
    journal.add(always(decided("rollback", "b")))
    for number in range(KEPT + 5):
        journal.add(always(decided("resume", "c", at=number)))
    assert len(journal.decisions) <= KEPT + 1
    assert standing(graph(), journal.decisions).keys() == {"b"}


def test_what_comes_late_takes_its_place_by_its_time() -> None:
    journal = Journal()
    for number in range(KEPT):
        journal.add(always(decided("resume", "c", at=100.0 + number)))
    # Made before all of these, and undone before it came.
    journal.add(always(decided("resume", "b", at=10.0)))
    journal.hear([decided("abort", "b", at=9.0), decided("abort", "c", at=150.5)])
    times = [each.at for each in journal.decisions]
    assert times == sorted(times)
    assert standing(graph(), journal.decisions) == {}
    # What is kept are the last by time, and not those that came last.
    before = journal.decisions
    journal.hear([decided("resume", "c", at=50.0)])
    assert journal.decisions == before


def test_those_that_tell_what_stands_tell_it_like_all() -> None:
    chance = random.Random(1)
    graphs = [graph(), graph("spec.variants.b.weight=5")]
    for _ in range(300):
        decisions = [
            decided(chance.choice(get_args(Kind)), chance.choice("abc"), chance.choice(graphs), at=float(number))
            for number in range(chance.randrange(30))
        ]
        some = telling(decisions)
        assert [each.at for each in some] == sorted(each.at for each in some)
        for each in graphs:
            assert standing(each, some) == standing(each, decisions)


def test_a_file_that_is_lost_loses_nothing_for_those_who_run(tmp_path: Path) -> None:
    path = tmp_path / "variants.json"
    journal = Journal(path)
    journal.add(always(decided("abort", "b", at=1.0)))
    path.unlink()
    assert not journal.look()
    journal.add(always(decided("abort", "c", at=2.0)))
    fresh = Journal(path)
    fresh.look()
    assert [each.variant for each in fresh.decisions] == ["b", "c"]


def test_a_time_that_no_calendar_has_is_no_decisions(tmp_path: Path) -> None:
    path = tmp_path / "variants.json"
    Journal(path).add(always(decided("abort", "b", at=1e300)))
    journal = Journal(path)
    journal.look()
    assert journal.decisions == ()


def test_a_file_that_cannot_be_read_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "variants.json"
    journal = Journal(path)
    journal.add(always(decided("abort", "b")))
    path.write_text('{"decisions": [{"kind": "conquer"}]}')
    with caplog.at_level(logging.ERROR):
        assert not journal.look()
    assert str(path) in caplog.text
    assert [each.variant for each in journal.decisions] == ["b"]


def test_what_cannot_be_kept_is_not_decided(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "gone" / "variants.json")
    with pytest.raises(LaunchError, match="nothing is decided"):
        journal.add(always(decided("abort", "b")))
    assert journal.decisions == ()
    # Nor where there is a directory, and then no file.
    path = tmp_path / "variants.json"
    path.mkdir()
    journal = Journal(path)
    with pytest.raises(LaunchError, match="nothing is decided"):
        journal.add(always(decided("abort", "b")))
    assert journal.decisions == ()
