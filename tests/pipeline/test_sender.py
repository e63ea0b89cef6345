"""What a sender sees of a link, in time: how long it is silent, and how long what was measured holds."""

from __future__ import annotations

import pytest

from pdd_runtime.graph import loads
from pdd_runtime.pipeline.links import Links
from pdd_runtime.pipeline.sender import Fetch, Fetches, Seen, Sender
from pdd_runtime.plugins.transport import LinkTelemetry

GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: g}
spec:
  model: {source: x}
  clusters: {dc-a: {}, dc-b: {}}
  links: {wan: {between: [dc-a, dc-b], bandwidth: 200Mbit/s, rtt: 50ms}}
  pools: {all: {role: aggregated, cluster: dc-a, engine: {plugin: scripted}}}
"""


class Way:
    """One sender, told what it says at which second."""

    def __init__(self) -> None:
        self.sender = Sender("dc-a")

    def says(self, at: float, sent: int, queue: int, goodput: float | None = None) -> None:
        self.sender.update(LinkTelemetry(cluster="dc-b", sent=sent, queue=queue, goodput=goodput), at)

    def seen(self, at: float) -> Seen:
        seen = self.sender.seen(at)
        assert seen is not None
        return seen


@pytest.fixture
def way() -> Way:
    return Way()


def test_who_has_said_nothing_or_has_nothing_to_send_knows_nothing(way: Way) -> None:
    assert way.sender.seen(0.0) is None
    way.says(0.0, sent=0, queue=0)
    assert way.seen(100.0).stalled is None


def test_a_way_that_lets_nothing_through_is_silent_for_ever_longer(way: Way) -> None:
    way.says(0.0, sent=100, queue=50)
    assert way.seen(0.5).stalled == 0.0
    assert way.seen(3.0).stalled == 3.0
    # More to send is no sign of life.
    way.says(4.0, sent=100, queue=90)
    assert way.seen(5.0).stalled == 5.0
    way.says(6.0, sent=101, queue=89)
    assert way.seen(6.5).stalled == 0.0


def test_a_pause_with_nothing_to_send_is_no_silence(way: Way) -> None:
    way.says(0.0, sent=100, queue=0)
    way.says(60.0, sent=100, queue=50)
    assert way.seen(60.5).stalled == 0.0


def test_a_cut_is_remembered_for_as_long_as_it_lasted_and_forgotten_as_soon_as_something_gets_through(way: Way) -> None:
    way.says(0.0, sent=100, queue=50)
    # After 8 s all who wanted something of it are gone.
    way.says(8.0, sent=100, queue=0)
    assert [way.seen(at).stalled for at in (8.0, 10.0, 15.0, 16.0)] == [8.0, 6.0, 1.0, None]
    # Somebody tries too early: it is silent for as long as it was said to be.
    way.says(10.0, sent=100, queue=50)
    assert way.seen(10.1).stalled == pytest.approx(5.9)
    way.says(10.2, sent=150, queue=0)
    assert way.seen(10.3).stalled is None


def test_goodput_of_a_silent_way_is_not_the_links(way: Way) -> None:
    way.says(0.0, sent=100, queue=50, goodput=20e6)
    way.says(9.0, sent=100, queue=0, goodput=11.0)
    assert way.seen(9.0).telemetry.goodput == 20e6
    way.says(30.0, sent=200, queue=0, goodput=15e6)
    assert way.seen(30.0).telemetry.goodput == 15e6


def test_a_line_is_silent_when_it_is_for_all_who_try() -> None:
    links = Links(loads(GRAPH).graph)
    idle, silent = LinkTelemetry(cluster="dc-b"), LinkTelemetry(cluster="dc-b", queue=5)
    assert links.views([Seen("dc-a", silent, 4.0), Seen("dc-a", idle)])[0].stalled == 4.0
    assert links.views([Seen("dc-a", silent, 4.0), Seen("dc-a", silent, 0.0)])[0].stalled == 0.0


def test_what_was_slow_once_is_tried_again_and_what_was_fast_stays_so() -> None:
    links = Links(loads(GRAPH).graph)
    slow, fast = (LinkTelemetry(cluster="dc-b", goodput=goodput) for goodput in (1e6, 80e6))
    rates = [links.views([Seen("dc-a", slow, None, idle)])[0].rate for idle in (0.0, 10.0, 60.0, 600.0)]
    assert rates[0] == 1e6
    assert rates == sorted(rates)
    assert rates[3] == pytest.approx(25e6)
    assert links.views([Seen("dc-a", fast, None, 600.0)])[0].rate == 80e6


def test_what_a_driver_waits_for_is_silent_once_it_was_made_and_until_anything_comes() -> None:
    fetches = Fetches("dc-a", "dc-b")
    first, second = Fetch(fetches), Fetch(fetches)
    assert fetches.seen(100.0) is None
    first.made(100.0)
    second.made(102.0)

    def stalled(at: float) -> float | None:
        seen = fetches.seen(at)
        return None if seen is None else seen.stalled

    assert stalled(104.0) == 4.0
    # A part of either is a sign of life, what is said twice is none.
    second.has(500, 105.0)
    second.has(500, 106.0)
    assert stalled(105.5) == 0.0
    assert stalled(107.0) == 2.0
    second.has(900, 107.5)
    second.end(107.5)
    assert stalled(107.6) == 0.0
    first.has(10, 108.0)
    first.end(108.0)
    first.made(109.0)
    assert stalled(200.0) is None


def test_a_fetch_that_is_given_up_is_remembered_as_silence() -> None:
    fetches = Fetches("dc-a", "dc-b")
    fetch = Fetch(fetches)
    fetch.made(0.0)
    fetch.end(6.0)
    seen = fetches.seen(7.0)
    assert seen is not None
    assert seen.stalled == 5.0
    assert (seen.telemetry.queue, seen.telemetry.goodput) == (0, None)
