"""What the frontends of several launchers know of each other's decisions."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import fields

from pdd_runtime.frontend.bulletin import LIMIT, Bulletin
from pdd_runtime.frontend.experiment import Experiment
from pdd_runtime.graph import Graph, loads
from pdd_runtime.pipeline.decisions import Journal, Kind
from pdd_runtime.plugins.discovery import Member
from pdd_runtime.plugins.routing import WorkerKey

TEXT = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: doors}
spec:
  model: {source: toy}
  clusters: {dc-a: {}, dc-b: {}}
  links: {wan: {between: [dc-a, dc-b], bandwidth: 1Gbit/s, rtt: 10ms}}
  pools: {a: {role: aggregated, cluster: dc-a, engine: {plugin: scripted}}}
  frontend: {cluster: [dc-a, dc-b]}
  variants: {a: {weight: 1}, b: {weight: 1}, c: {weight: 1}}
"""


def graph(*overrides: str) -> Graph:
    return loads(TEXT, list(overrides)).graph


class Front:
    """A frontend, and where it keeps what was decided."""

    def __init__(self, index: int, journal: Journal, of: Graph | None = None, secret: str = "s") -> None:
        self.key = WorkerKey("frontend", index, f"epoch-{index}")
        self.experiment = Experiment(of or graph(), journal)
        self.bulletin = Bulletin(self.experiment, secret, self.key)

    def decide(self, kind: Kind, *variants: str, why: str = "") -> None:
        self.experiment.decide(kind, variants, "operator", why)

    @property
    def weights(self) -> list[float]:
        return list(self.experiment.weights.values())

    def shown(self, bulletin: str | None = None) -> Member:
        """As discovery has it."""
        text = self.bulletin.text() if bulletin is None else bulletin
        return Member(
            key=self.key, role="frontend", cluster="dc-a", state="ready", pid=1, endpoint="http://a", bulletin=text
        )


def meet(*fronts: Front) -> None:
    """All see what all have said so far."""
    members = [front.shown() for front in fronts]
    for front in fronts:
        front.bulletin.hear(members)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Front, Front]:
    return Front(0, Journal(tmp_path / "one")), Front(1, Journal(tmp_path / "other"))


def test_what_one_decides_the_others_take_over_and_keep(pair: tuple[Front, Front], tmp_path: Path) -> None:
    one, other = pair
    for do, expected in (
        (("promote", "b"), [0, 1, 0]),
        (("rollback", "b"), [1, 0, 1]),
        (("abort", "c"), [1, 0, 0]),
        (("resume", "b"), [1, 1, 0]),
    ):
        one.decide(*do)  # type: ignore[arg-type]
        meet(one, other)
        assert one.weights == other.weights == expected
    assert Experiment(graph(), Journal(tmp_path / "other")).weights == other.experiment.weights
    assert other.experiment.decisions == one.experiment.decisions


def test_what_both_decided_while_they_could_not_meet_ends_the_same_at_both(pair: tuple[Front, Front]) -> None:
    one, other = pair
    one.decide("promote", "b")
    other.decide("promote", "c")
    one.decide("abort", "b")
    meet(one, other)
    assert one.weights == other.weights == [0, 0, 1]


def test_a_decision_counts_after_those_that_were_known_whatever_the_clock_says(
    pair: tuple[Front, Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair
    one.decide("promote", "b")
    meet(one, other)
    begun = time.time()
    with monkeypatch.context() as late:
        late.setattr(time, "time", lambda: begun - 3600)
        other.decide("resume", "b")
        other.decide("abort", "b", "c")
    meet(one, other)
    assert one.weights == other.weights == [1, 0, 0]


def test_what_is_not_sealed_with_the_graphs_secret_does_not_count(
    pair: tuple[Front, Front], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = pair
    stranger, foreign = Front(0, Journal(), secret="guessed"), Front(0, Journal(), graph("metadata.name=twin"))
    for forger in (stranger, foreign):
        forger.decide("promote", "c")
    one.decide("promote", "b")
    seal, _, text = one.bulletin.text().partition(" ")
    forged = [
        stranger.bulletin.text(),
        foreign.bulletin.text(),
        one.bulletin.text().replace('"variant":"b"', '"variant":"c"'),
        text,
        f"ä {text}",
        seal,
        "[" * 100_000,
    ]
    for bulletin in forged:
        other.bulletin.hear([one.shown(bulletin)])
        assert other.weights == [1, 1, 1]
    assert "does not count" in caplog.text
    other.bulletin.hear([one.shown()])
    assert other.weights == [0, 1, 0]


def test_of_more_than_there_is_room_for_the_newest_are_told(pair: tuple[Front, Front]) -> None:
    one, other = pair
    for number in range(100):
        one.decide("resume" if number % 2 else "abort", "b", why=f"{number} " + 'ä"' * 200)
    one.decide("promote", "c")
    assert len(one.bulletin.text()) < LIMIT + 200
    assert len(msgspec.json.encode(one.shown())) < 64 << 10
    meet(one, other)
    assert one.weights == other.weights == [0, 0, 1]
    meet(one, other)
    assert one.bulletin.behind() == other.bulletin.behind() == []


def test_what_stands_is_told_however_long_ago_it_was_decided(pair: tuple[Front, Front]) -> None:
    one, other = pair
    one.decide("abort", "c")
    for number in range(100):
        one.decide("abort" if number % 2 else "resume", "b", why="long " * 100)
    assert len(one.bulletin.text()) < LIMIT + 200
    meet(one, other)
    assert one.weights == other.weights == [1, 0, 0]
    meet(one, other)
    assert one.bulletin.behind() == other.bulletin.behind() == []


def test_nobody_waits_until_discovery_has_told_those_of_the_same_launcher(pair: tuple[Front, Front]) -> None:
    one, other = pair
    one.bulletin.hear([other.shown()], near=[other.key])
    one.decide("promote", "b")
    assert one.bulletin.behind() == []
    # What they say counts all the same.
    other.decide("promote", "c")
    one.bulletin.hear([other.shown()], near=[other.key])
    assert one.weights == [0, 0, 1]


def test_frontends_of_before_and_of_now_find_each_other(pair: tuple[Front, Front]) -> None:
    one, other = pair
    one.decide("promote", "b")
    # Before there were bulletins a record had no such field, and a field that is not known is passed over.
    old = msgspec.defstruct("Member", [(f.name, f.type) for f in fields(Member) if f.name != "bulletin"], kw_only=True)
    record = msgspec.json.decode(msgspec.json.encode(one.shown()), type=old)
    assert record.endpoint == "http://a"  # type: ignore[attr-defined]
    found = msgspec.json.decode(msgspec.json.encode(record), type=Member)
    assert found == one.shown("")
    other.bulletin.hear([found])
    assert other.weights == [1, 1, 1]
    other.decide("abort", "c")
    assert other.bulletin.behind() == [one.key]


async def test_it_is_known_who_has_not_heard_and_waited_for(pair: tuple[Front, Front]) -> None:
    one, other = pair
    meet(one, other)
    one.decide("promote", "b")
    assert one.bulletin.behind() == [other.key]
    waiting = asyncio.create_task(one.bulletin.carried(60.0))
    other.bulletin.hear([one.shown()])
    await asyncio.sleep(0)
    assert not waiting.done()
    one.bulletin.hear([other.shown()])
    await waiting
    assert one.bulletin.behind() == []


async def test_nobody_waits_for_ever_for_one_that_does_not_hear(pair: tuple[Front, Front]) -> None:
    one, other = pair
    meet(one, other)
    one.decide("promote", "b")
    await one.bulletin.carried(0.0)
    assert one.bulletin.behind() == [other.key]


def test_where_the_file_cannot_be_written_what_others_decide_counts_all_the_same(
    pair: tuple[Front, Front], tmp_path: Path
) -> None:
    one, _ = pair
    lost = Front(1, Journal(tmp_path / "away" / "variants.json"))
    one.decide("promote", "b")
    meet(one, lost)
    assert lost.weights == [0, 1, 0]
    meet(one, lost)
    assert one.bulletin.behind() == []
