from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pdd_runtime.planner.profile import Profile, ProfileError, read_profile

WRITTEN = """
apiVersion: pdd/v1alpha1
kind: Profile
pools:
  prefill:
    latency: {plugin: roofline, config: {hardware: 4x8xh100, model: deepseek-v4-pro}}
  main:
    latency:
      plugin: table
      config:
        prefill: {tokens: [1, 512], context: [0, 4096], seconds: [[0.011, 0.013], [0.082, 0.121]]}
        decode: {tokens: [1, 16], context: [64, 4096], seconds: [[0.011, 0.013], [0.014, 0.032]]}
    capacity: 200000
    kv_constant: 0
    kv_token: 131072
    overhead: 2ms
links:
  wan: {rtt: 50ms, goodput: 9.4Gbit/s}
"""


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    profile = Profile.model_validate(yaml.safe_load(WRITTEN))
    assert profile.pools["main"].overhead == 0.002
    assert profile.links["wan"].goodput == 9.4e9
    file = tmp_path / "p.yaml"
    file.write_text(profile.to_yaml())
    assert read_profile(file) == profile
    # A table's rows stand in a line each, for people.
    assert "- [0.011, 0.013]\n" in file.read_text()


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        ("pools: [", "the profile is no YAML", "expected the node content"),
        ("pools: {}", "the profile is wrong at pools", "at least 1 item"),
        ("- 1", "the profile is wrong", "valid dictionary"),
        ("kind: InferenceGraph", "the profile is wrong at kind", "'Profile'"),
        ("pools: {a: {}}", "the profile is wrong at pools.a.latency", "Field required"),
        (
            "pools: {a: {latency: {plugin: t}, overhead: 5}}",
            "the profile is wrong at pools.a.overhead",
            "not a duration",
        ),
        (
            "pools: {a: {latency: {plugin: t}, bath_limit: 5}}",
            "the profile is wrong at pools.a.bath_limit",
            "not permitted",
        ),
    ],
)
def test_a_profile_that_is_none_is_told_with_its_place(tmp_path: Path, text: str, what: str, why: str) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(text)
    with pytest.raises(ProfileError) as caught:
        read_profile(file)
    assert (caught.value.what, caught.value.where) == (what, str(file))
    assert why in caught.value.why


def test_a_file_that_is_not_there_or_too_large_is_told(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot be read"):
        read_profile(tmp_path / "none.yaml")
    file = tmp_path / "large.yaml"
    with file.open("wb") as large:
        large.truncate((16 << 20) + 1)
    with pytest.raises(ProfileError, match="more than 16 MiB"):
        read_profile(file)


def test_nothing_in_a_profile_is_run(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("pools: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(ProfileError, match="no YAML"):
        read_profile(file)


def test_what_is_not_said_is_not_written() -> None:
    data: dict[str, Any] = yaml.safe_load(Profile.model_validate(yaml.safe_load(WRITTEN)).to_yaml())
    assert "capacity" not in data["pools"]["prefill"]
