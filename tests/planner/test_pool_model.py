from __future__ import annotations

import pytest

from pdd_runtime.errors import PluginError
from pdd_runtime.graph import Graph, loads
from pdd_runtime.planner.context_limit import ContextLimit, least
from pdd_runtime.planner.figures import FigureError
from pdd_runtime.planner.hardware import Hardware
from pdd_runtime.planner.model_spec import ModelFigures
from pdd_runtime.planner.pool_model import PoolModel, pool_models
from pdd_runtime.planner.profile import Profile, ProfileError
from pdd_runtime.plugins import PluginManager, load_plugins

GRAPH = """
apiVersion: pdd/v1alpha1
kind: InferenceGraph
metadata: {name: g}
spec:
  model: {source: deepseek-ai/DeepSeek-V3}
  clusters: {dc-a: {}, dc-b: {}}
  links: {wan: {between: [dc-a, dc-b], bandwidth: 10Gbit/s, rtt: 30ms}}
  pools:
    prefill: {role: prefill, cluster: dc-a, hardware: 2x8xh100, engine: {plugin: scripted}}
    main: {role: main, cluster: dc-b, hardware: 8xh200, engine: {plugin: scripted}}
  edges:
    - {from: prefill, to: main, carries: kv, transport: {plugin: tcp}, link: wan}
"""
TABLE = {
    "prefill": {"tokens": [1, 100], "context": [0, 1000], "seconds": [[0.01, 0.01], [0.1, 0.2]]},
    "decode": {"tokens": [1], "context": [0], "seconds": [[0.01]]},
}
MEASURED = {
    "latency": {"plugin": "table", "config": TABLE},
    "chunk": 100,
    "capacity": 5000,
    "kv_constant": 10,
    "kv_token": 2,
}


@pytest.fixture(scope="module")
def plugins() -> PluginManager:
    return load_plugins()


def graph(*changes: tuple[str, str]) -> Graph:
    text = GRAPH
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return loads(text).graph


def profile(**pools: dict[str, object]) -> Profile:
    return Profile.model_validate({"pools": pools})


def test_without_a_profile_hardware_and_model_say_it(plugins: PluginManager) -> None:
    found = pool_models(graph(), plugins)
    assert list(found) == ["prefill", "main"]
    main = found["main"]
    assert main.latency.source.startswith("roofline of deepseek-ai/DeepSeek-V3 on 8xh200")
    assert (main.kv_constant, main.kv_token) == (0.0, 70272)
    assert main.kv_bytes(1000) == 70_272_000
    # 90 % of 8 x 141 GB, less the weights.
    assert main.capacity == int((0.9 * 8 * 141e9 - 671e9) / 70272)
    # More chips read the weights sooner.
    assert found["prefill"].latency.decode(1, 0) < main.latency.decode(1, 0)


def test_a_profile_says_it_for_the_pools_that_it_has(plugins: PluginManager) -> None:
    found = pool_models(graph(), plugins, profile(main=MEASURED))
    main = found["main"]
    assert (main.chunk, main.capacity, main.block, main.kv_constant, main.kv_token) == (100, 5000, 64, 10, 2)
    assert main.latency.prefill(100, 1000) == pytest.approx(0.2)
    assert found["prefill"].latency.source.startswith("roofline")


def test_a_prompt_takes_its_chunks_one_after_another(plugins: PluginManager) -> None:
    main = pool_models(graph(), plugins, profile(main=MEASURED))["main"]
    passes = main.latency.prefill(100, 30), main.latency.prefill(100, 130), main.latency.prefill(50, 230)
    assert main.prompt(250, 30) == pytest.approx(sum(passes))
    assert main.prompt(0, 30) == 0
    assert main.prompt(100, 30) == passes[0]


def test_a_profile_may_name_a_model_that_knows_memory(plugins: PluginManager) -> None:
    said = {"latency": {"plugin": "roofline", "config": {"hardware": "8xh200", "model": "deepseek-v3", "kv_bits": 8}}}
    main = pool_models(graph(), plugins, profile(main={**said, "batch_limit": 64}))["main"]
    assert (main.kv_token, main.batch_limit) == (35136, 64)
    capped = pool_models(graph(), plugins, profile(main={**said, "capacity": 1000}))["main"]
    assert capped.capacity == 1000


def test_hardware_and_models_of_ones_own_are_known(plugins: PluginManager) -> None:
    own = graph(("8xh200", "8xours"), ("deepseek-ai/DeepSeek-V3", "mine"))
    hardware = {"ours": Hardware.model_validate({"like": "h200", "decode": 0.5})}
    models = {"mine": ModelFigures.model_validate({"like": "deepseek-v3"})}
    slow = pool_models(own, plugins, hardware=hardware, models=models, settings={"layer": "0s", "network": 1.0})["main"]
    fast = pool_models(graph(), plugins, settings={"layer": "0s", "network": 1.0})["main"]
    assert slow.latency.decode(1, 0) == pytest.approx(2 * fast.latency.decode(1, 0), rel=0.01)


@pytest.mark.parametrize(
    ("changes", "said", "error", "what"),
    [
        ([("hardware: 8xh200, ", "")], None, ProfileError, "nothing says how fast the workers of pool main are"),
        ([("8xh200", "cpu")], None, FigureError, 'no figures of a chip called "cpu" are known'),
        ([("8xh200", "h200")], None, FigureError, "deepseek-ai/DeepSeek-V3 does not fit on h200"),
        (
            [],
            {"latency": {"plugin": "tabel"}},
            PluginError,
            'no installed plugin brings a latency model called "tabel"',
        ),
        ([], {"latency": {"plugin": "table"}}, PluginError, 'latency model table needs the setting "prefill"'),
        ([], {**MEASURED, "capacity": None}, ProfileError, "capacity must be given"),
    ],
)
def test_what_is_not_known_is_told_with_its_place(
    plugins: PluginManager,
    changes: list[tuple[str, str]],
    said: dict[str, object] | None,
    error: type[FigureError | PluginError | ProfileError],
    what: str,
) -> None:
    with pytest.raises(error) as caught:
        pool_models(graph(*changes), plugins, profile(main=said) if said else None)
    assert caught.value.what == what
    assert "main" in caught.value.where or "tabel" in what


def test_a_model_of_a_pool_cannot_be_changed() -> None:
    assert PoolModel.__dataclass_params__.frozen  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("source", "config", "measured", "tokens", "said"),
    [
        ("toy", "{context_length: 32768}", None, 32768, "engine.config.context_length in the graph"),
        ("toy", '{context_length: "32768"}', 40000, 32768, "engine.config.context_length in the graph"),
        ("toy", "{}", None, 8192, "engine.config.context_length, which has that default"),
        ("toy", "{context_length: 32768}", 2048, 2048, "context_length in the profile"),
        ("llama-3.1-8b", "{context_length: 200000}", None, 131072, "context_length of model llama-3.1-8b"),
    ],
)
def test_the_longest_sequence_is_the_least_that_graph_profile_and_model_say(
    source: str, config: str, measured: int | None, tokens: int, said: str, plugins: PluginManager
) -> None:
    own = graph(
        ("deepseek-ai/DeepSeek-V3", source),
        ("8xh200, engine: {plugin: scripted}", f"8xh200, engine: {{plugin: scripted, config: {config}}}"),
    )
    pool = MEASURED | ({} if measured is None else {"context_length": measured})
    assert pool_models(own, plugins, profile(prefill=pool, main=pool))["main"].context == (tokens, said, ("main",))


def test_an_engine_that_is_not_installed_has_the_limit_that_the_graph_says(plugins: PluginManager) -> None:
    elsewhere = (
        "8xh200, engine: {plugin: scripted}",
        "8xh200, engine: {plugin: theirs, config: {context_length: 5000}}",
    )
    assert pool_models(graph(elsewhere), plugins)["main"].context == (
        5000,
        "engine.config.context_length in the graph",
        ("main",),
    )
    unsaid = ("8xh200, engine: {plugin: scripted}", "8xh200, engine: {plugin: theirs}")
    found = pool_models(
        graph(unsaid, ("deepseek-ai/DeepSeek-V3", "toy")), plugins, profile(prefill=MEASURED, main=MEASURED)
    )
    assert found["main"].context is None


def test_a_limit_that_is_no_number_is_told_with_its_place(plugins: PluginManager) -> None:
    wrong = ("8xh200, engine: {plugin: scripted}", "8xh200, engine: {plugin: theirs, config: {context_length: long}}")
    with pytest.raises(FigureError, match="'long' is no number of tokens") as told:
        pool_models(graph(wrong), plugins)
    assert told.value.where == "spec.pools.main.engine.config.context_length"


def test_of_several_pools_the_shortest_count_and_are_named() -> None:
    one, two, three = (ContextLimit(tokens, "a test", (pool,)) for pool, tokens in (("a", 7), ("b", 9), ("c", 7)))
    assert least([one, None, two, three]) == (7, "a test", ("a", "c"))
    assert least([one, two]) == one
    assert least([None]) is None
