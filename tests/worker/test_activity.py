"""Promises about which requests run."""

from __future__ import annotations

from pdd_runtime.worker import activity
from pdd_runtime.worker.activity import Activity


def test_a_request_runs_while_one_of_its_streams_publishes() -> None:
    seen = Activity()
    assert seen.state("r") == "unseen"
    with seen.publishing("r"):
        with seen.publishing("r") as end:
            end()
            end()
            assert seen.state("r") == "running"
        assert seen.running == 1
    assert seen.state("r") == "ended"
    with seen.publishing("r"):
        assert seen.state("r") == "running"


def test_watchers_hear_of_beginning_and_end() -> None:
    seen, heard = Activity(), []
    stop = seen.watch(lambda request_id: heard.append((request_id, seen.state(request_id))))
    with seen.publishing("r"):
        pass
    stop()
    with seen.publishing("r"):
        pass
    assert heard == [("r", "running"), ("r", "ended")]


def test_ended_requests_are_not_remembered_for_ever() -> None:
    seen = Activity()
    for number in range(activity.REMEMBERED + 1):
        with seen.publishing(str(number)):
            pass
    assert seen.state("0") == "unseen"
    assert seen.state("1") == "ended"
