from __future__ import annotations

import logging

import pytest

from pdd_runtime.pipeline.hit_rates import LEAST, MEMORY, HitRates


def test_a_gap_is_of_tokens_not_of_requests_and_by_pool() -> None:
    rates = HitRates(0.5)
    for _ in range(LEAST):
        rates.saw("main-a", 1000, 900, 800)
        rates.saw("main-a", 10, 0, 10)
        rates.saw("main-b", 100, 50, 50)
    assert rates.gaps() == pytest.approx({"main-a": 90 / 1010, "main-b": 0.0}, rel=0.01)
    assert rates.rates()["main-a"] == pytest.approx((900 / 1010, 810 / 1010), rel=0.01)


def test_a_few_requests_say_nothing() -> None:
    rates = HitRates(0.1)
    for _ in range(LEAST - 1):
        rates.saw("main", 100, 100, 0)
    assert rates.gaps() == {}
    assert not rates.alarms


def test_an_alarm_is_told_once_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    rates = HitRates(0.2)
    with caplog.at_level(logging.INFO):
        for _ in range(int(MEMORY)):
            rates.saw("main", 100, 95, 90)
        assert not caplog.records
        for _ in range(int(MEMORY)):
            rates.saw("main", 100, 95, 10)
        assert rates.alarms == {"main"}
        for _ in range(int(5 * MEMORY)):
            rates.saw("main", 100, 95, 90)
        assert not rates.alarms
    fell, caught_up = caplog.records
    assert fell.levelname == "WARNING"
    assert fell.getMessage().startswith("main pool main falls behind: ")
    assert caught_up.getMessage().startswith("main pool main has caught up: ")


def test_an_alarm_does_not_end_just_below_its_bound() -> None:
    rates = HitRates(0.2)
    for _ in range(LEAST):
        rates.saw("main", 100, 90, 69)
    assert rates.alarms == {"main"}
    for _ in range(int(20 * MEMORY)):
        rates.saw("main", 100, 90, 72)
    assert rates.gaps()["main"] < 0.2
    assert rates.alarms == {"main"}


def test_without_a_bound_there_is_no_alarm() -> None:
    rates = HitRates(None)
    for _ in range(LEAST):
        rates.saw("main", 100, 100, 0)
    assert rates.gaps() == {"main": 1.0}
    assert not rates.alarms
