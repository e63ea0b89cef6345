"""A real graph of scripted engines, whose speeds are known, profiled by the command."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from pdd_runtime.graph import load
from pdd_runtime.planner.latency import Grid, TableConfig
from pdd_runtime.planner.pool_model import pool_models
from pdd_runtime.planner.profile import Profile, read_profile
from pdd_runtime.plugins import load_plugins
from tests.cli.shell import Cli
from tests.graphs import pdd

RATE, STEP, CHUNK, TOKEN = 400.0, 0.02, 32, 4096
LINE = 20e6
GRAPH = pdd(
    "measured",
    engine=f"{{plugin: scripted, config: {{prefill_rate: {RATE}, token_time: {STEP}, chunk: {CHUNK}, "
    f"token_bytes: {TOKEN}, batch_limit: 4}}}}",
    wan=f"bandwidth: {LINE / 1e6:g}Mbit/s, rtt: 40ms, emulate: true",
    model="script",
)


pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    command = Cli(tmp_path_factory.mktemp("profile"))
    command.write(GRAPH, "graph.yaml")
    yield command
    command("down", "measured", "--timeout", "0")


@pytest.fixture(scope="module")
def profile(cli: Cli) -> Profile:
    """As it was written."""
    done = cli("profile", "graph.yaml", "--longest", "256", "--repeats", "1", "--format", "json", "--out", "out.yaml")
    assert done.code == 0, done.err
    written = read_profile(cli.directory / "out.yaml")
    assert Profile.model_validate(json.loads(done.out)) == written
    return written


def grids(profile: Profile, pool: str) -> tuple[Grid, Grid]:
    """Of passes, and of steps."""
    config = TableConfig.model_validate(profile.pools[pool].latency.config)
    return config.prefill, config.decode


def test_it_has_what_the_engines_say_of_themselves(profile: Profile) -> None:
    assert list(profile.pools) == ["prefill", "relay", "main"]
    for said in profile.pools.values():
        assert (said.chunk, said.batch_limit, said.block, said.capacity) == (CHUNK, 4, 16, 16384)
        assert (said.kv_constant, said.kv_token) == (0, TOKEN)


@pytest.mark.parametrize("pool", ["prefill", "relay", "main"])
def test_passes_take_what_the_engine_takes_for_their_new_tokens(profile: Profile, pool: str) -> None:
    passes, _ = grids(profile, pool)
    assert (passes.tokens, passes.context) == ([1, 8, 32], [0, 256])
    for column in range(2):
        seconds = [row[column] or 0.0 for row in passes.seconds]
        # No computer is so fast that it takes less; how much more a busy one takes is not for a test to say.
        assert seconds[2] > 0.5 * CHUNK / RATE
        # Of 32 tokens behind 256, not of 288.
        assert seconds[0] < seconds[2]


@pytest.mark.parametrize("pool", ["relay", "main"])
def test_steps_are_timed_up_to_the_engines_batch(profile: Profile, pool: str) -> None:
    _, steps = grids(profile, pool)
    assert (steps.tokens, steps.context) == ([1, 2, 4], [40, 264])
    # On a busy computer longer prompts of a batch may be left out.
    assert all(seconds > 0.5 * STEP for row in steps.seconds for seconds in row if seconds is not None)
    assert None not in [row[0] for row in steps.seconds]


def test_prefill_workers_are_not_asked_to_decode(profile: Profile) -> None:
    passes, steps = grids(profile, "prefill")
    assert (steps.tokens, steps.seconds) == ([1], passes.seconds[:1])


def test_pools_that_are_set_alike_are_measured_once(profile: Profile) -> None:
    assert profile.pools["relay"] == profile.pools["main"]


def test_links_are_timed_as_they_are(profile: Profile) -> None:
    wan = profile.links["wan"]
    assert wan.rtt > 0.02
    assert wan.goodput is not None
    assert 0 < wan.goodput < 2 * LINE


def test_a_simulator_takes_it(profile: Profile, cli: Cli) -> None:
    found = pool_models(load(cli.directory / "graph.yaml").graph, load_plugins(), profile)
    assert found["main"].prompt(2 * CHUNK, 0) > 0.5 * 2 * CHUNK / RATE
    assert "graph measured, pool relay" in found["main"].latency.source
    assert profile.pools["main"].context_length == 8192
    assert found["main"].context is not None


def test_a_graph_that_runs_is_measured_by_its_name(cli: Cli) -> None:
    up = cli("up", "graph.yaml", "-d", "--wait", "--wait-timeout", "60")
    assert up.code == 0, up.err
    done = cli("profile", "measured", "--longest", "64", "--batch", "1", "--repeats", "1")
    assert done.code == 0, done.err
    assert "written to measured.profile.yaml" in done.err
    assert "GOODPUT" in done.out
    assert read_profile(cli.directory / "measured.profile.yaml").graph == "measured"
    # It still runs.
    assert cli("ps", "measured").code == 0


def test_what_cannot_be_measured_is_told_before_anything_is_begun(cli: Cli) -> None:
    assert cli("profile", "nobody").code == 3
    done = cli("profile", "graph.yaml", "--out", "no/such/place.yaml")
    assert done.code == 1
    assert "the profile cannot be written" in done.err
