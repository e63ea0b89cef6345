from __future__ import annotations

import threading

import pytest

from pdd_runtime.rpc import Line

CHUNK = 64 * 1024


def test_bytes_take_their_time_at_the_rate_and_then_the_delay() -> None:
    line = Line(bandwidth=8e6, delay=0.025)
    leaves_at, arrives_at = line.reserve(100_000, now=10.0)
    assert leaves_at == pytest.approx(10.1)
    assert arrives_at == pytest.approx(10.125)


def test_what_enters_a_busy_line_waits_for_what_entered_before() -> None:
    line = Line(bandwidth=8e6, delay=0.0)
    line.reserve(100_000, now=0.0)
    assert line.reserve(100_000, now=0.0)[0] == pytest.approx(0.2)
    assert line.reserve(100_000, now=5.0)[0] == pytest.approx(5.1)


def test_jitter_never_reorders() -> None:
    line = Line(bandwidth=1e9, delay=0.01, jitter=0.02, seed=7)
    arrivals = [line.reserve(100, now=i * 1e-4)[1] for i in range(1000)]
    assert arrivals == sorted(arrivals)
    assert max(arrival - i * 1e-4 for i, arrival in enumerate(arrivals)) <= 0.03 + 1e-3


def test_the_same_seed_gives_the_same_line() -> None:
    one, two = (Line(1e9, 0.01, jitter=0.02, seed=3) for _ in range(2))
    assert [one.reserve(10, i) for i in range(9)] == [two.reserve(10, i) for i in range(9)]


def test_a_small_message_behind_paced_bulk_waits_for_one_chunk_at_most() -> None:
    line = Line(bandwidth=200e6, delay=0.025)
    chunk_time = CHUNK * 8 / line.bandwidth
    free_at, worst = 0.0, 0.0
    for step in range(1000):
        time = step * chunk_time / 7
        if time >= free_at:
            free_at, _ = line.reserve(CHUNK, time)
        worst = max(worst, line.reserve(60, time)[1] - line.delay - time)
    assert worst <= chunk_time + 10 * 60 * 8 / line.bandwidth


def test_threads_that_share_a_line_share_its_rate() -> None:
    line = Line(bandwidth=8e6, delay=0.0)

    def send() -> None:
        for _ in range(1000):
            line.reserve(100, now=0.0)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert line.reserve(0, now=0.0)[0] == pytest.approx(0.4)


@pytest.mark.parametrize(("bandwidth", "delay", "jitter"), [(0, 0, 0), (1, -1, 0), (1, 0, -1)])
def test_a_line_that_cannot_be_is_refused(bandwidth: float, delay: float, jitter: float) -> None:
    with pytest.raises(ValueError, match="no such line"):
        Line(bandwidth, delay, jitter)


def test_a_cut_line_takes_nothing_in_until_its_end_and_what_has_entered_arrives() -> None:
    line = Line(bandwidth=8e6, delay=0.025)
    before = line.reserve(100_000, now=0.0)
    line.cut(until=10.0)
    assert before[1] == pytest.approx(0.125)
    assert line.reserve(100_000, now=0.0) == pytest.approx((10.1, 10.125))
    assert line.reserve(100_000, now=0.0) == pytest.approx((10.2, 10.225))
    assert line.reserve(100_000, now=11.0) == pytest.approx((11.1, 11.125))
    assert line.comes(now=5.0) == pytest.approx(10.025)
    assert line.comes(now=12.0) == pytest.approx(12.025)
