from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from pdd_runtime.graph.units import (
    Bandwidth,
    ByteRate,
    ComputingRate,
    Duration,
    Size,
    write_bandwidth,
    write_byte_rate,
    write_computing_rate,
    write_duration,
    write_size,
)

_positive = st.floats(min_value=0, max_value=1e15)


@given(_positive)
def test_what_is_written_reads_back_exactly(value: float) -> None:
    assert TypeAdapter(Duration).validate_python(write_duration(value)) == value
    assert TypeAdapter(Bandwidth).validate_python(write_bandwidth(value)) == value
    assert TypeAdapter(ByteRate).validate_python(write_byte_rate(value)) == value
    assert TypeAdapter(ComputingRate).validate_python(write_computing_rate(value)) == value


@given(st.integers(min_value=0, max_value=2**50))
def test_a_size_reads_back_exactly(value: int) -> None:
    assert TypeAdapter(Size).validate_python(write_size(value)) == value


def test_quantities_are_written_as_people_do() -> None:
    assert write_duration(0.05) == "50ms"
    assert write_duration(10.0) == "10s"
    assert write_bandwidth(200e6) == "200Mbit/s"
    assert write_bandwidth(10e9) == "10Gbit/s"
    assert write_size(512 * 2**20) == "512MiB"
    assert write_byte_rate(4.8e12) == "4.8TB/s"
    assert write_computing_rate(989e12) == "989TFLOP/s"


@pytest.mark.parametrize("text", ["", "5", "ms", "-5ms", "5 parsec", "5MS", "1e999s", "nan s", 5, None, True, "٣ms"])
def test_what_is_no_duration_is_refused(text: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Duration).validate_python(text)


@pytest.mark.parametrize(
    ("written", "form", "meant"),
    [
        ("200Mbps", Bandwidth, 'did you mean "200Mbit/s"?'),
        ("200 mbit/s", Bandwidth, 'did you mean "200Mbit/s"?'),
        ("1.5Gb/s", Bandwidth, 'did you mean "1.5Gbit/s"?'),
        ("25MB/s", Bandwidth, 'did you mean "200Mbit/s"? Bandwidths are in bits'),
        ("50 msec", Duration, 'did you mean "50ms"?'),
        ("5m", Duration, 'did you mean "5min"?'),
        ("3.35tb/s", ByteRate, 'did you mean "3.35TB/s"?'),
        ("400Gbit/s", ByteRate, 'write it like "3.35TB/s"'),
        ("989 tflop/s", ComputingRate, 'did you mean "989TFLOP/s"?'),
        ("50Mbps", Duration, 'write it like "50ms"'),
        ("200", Bandwidth, 'write it like "200Mbit/s"'),
        (50, Duration, 'write it like "50ms"'),
    ],
)
def test_another_units_name_is_told_in_ours(written: object, form: object, meant: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(form).validate_python(written)
    assert caught.value.errors()[0]["ctx"]["error"].fix == meant
