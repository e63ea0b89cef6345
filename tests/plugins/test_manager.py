from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import BaseModel, model_validator

import pdd_runtime
from pdd_runtime.errors import PluginError
from pdd_runtime.plugins import PluginManager, load_plugins
from pdd_runtime.plugins.manager import KINDS

Install = Callable[..., None]
Source = Callable[..., str]

HOOKS = (
    "pdd_register_engines, pdd_register_transports, pdd_register_routing_policies, "
    "pdd_register_handoff_strategies, pdd_register_discoveries, pdd_register_latency_models"
)
HOOKIMPL = "from pdd_runtime.plugins import hookimpl\n"


def problems(manager: PluginManager) -> list[str]:
    return [str(problem) for problem in manager.problems]


def refusal(find: Callable[[str], object], name: str) -> str:
    with pytest.raises(PluginError) as caught:
        find(name)
    return str(caught.value)


def test_a_class_is_found_by_kind_and_name(install: Install, engine: Source) -> None:
    install("acme", "1.2", "acme_plugin", engine("tiny"))
    manager = load_plugins()
    assert manager.engine("tiny").__module__ == "acme_plugin"
    assert problems(manager) == []
    assert [(entry.kind.noun, entry.name, str(entry.origin)) for entry in manager.registered] == [
        ("engine", "tiny", "plugin acme (acme 1.2)")
    ]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            "import no_such_module\n",
            "plugin broken (broken 0.3) cannot be imported\n"
            "  why: broken_plugin: ModuleNotFoundError: No module named 'no_such_module'\n"
            "  fix: install what it lacks, or remove broken",
        ),
        (
            "raise SystemExit('needs a GPU')\n",
            "plugin broken (broken 0.3) cannot be imported\n  why: broken_plugin: SystemExit: needs a GPU\n"
            "  fix: install what it lacks, or remove broken",
        ),
        (
            "x = 1\n",
            "plugin broken (broken 0.3) registers nothing\n"
            "  why: broken_plugin has no function marked with @hookimpl\n"
            f"  fix: mark one of {HOOKS}",
        ),
        (
            HOOKIMPL + "@hookimpl\ndef pdd_register_engine():\n    return []\n",
            "plugin broken (broken 0.3) has a wrong hook\n  why: there is no hook pdd_register_engine\n"
            '  fix: did you mean "pdd_register_engines"?',
        ),
        (
            HOOKIMPL + "@hookimpl\ndef pdd_register_engines(config):\n    return []\n",
            "plugin broken (broken 0.3) has a wrong hook\n"
            "  why: its pdd_register_engines takes arguments that the hook does not give: config\n"
            "  fix: remove them",
        ),
        (
            HOOKIMPL + "@hookimpl\ndef pdd_register_engines():\n    return 1 / 0\n",
            "plugin broken (broken 0.3): its hook pdd_register_engines failed\n"
            "  why: ZeroDivisionError: division by zero\n"
            "  fix: report it to its authors, or remove broken",
        ),
        (
            HOOKIMPL + "@hookimpl\ndef pdd_register_engines():\n    return 'tiny'\n",
            "plugin broken (broken 0.3): its hook pdd_register_engines returned 'tiny'\n"
            "  why: it must return a list of Engine classes\n"
            "  fix: report it to its authors, or remove broken",
        ),
        (
            HOOKIMPL + "class Tiny: ...\n@hookimpl\ndef pdd_register_engines():\n    return [Tiny]\n",
            "plugin broken (broken 0.3): its hook pdd_register_engines registered broken_plugin.Tiny, "
            "which is no engine\n  why: it is not a subclass of Engine\n"
            "  fix: see the contract, pdd_runtime.plugins.engine.Engine",
        ),
        (
            HOOKIMPL + "@hookimpl\ndef pdd_register_engines():\n    return [7]\n",
            "plugin broken (broken 0.3): its hook pdd_register_engines registered 7, which is no engine\n"
            "  why: it is not a class\n  fix: see the contract, pdd_runtime.plugins.engine.Engine",
        ),
    ],
)
def test_a_broken_plugin_is_named_with_its_distribution_and_takes_nothing_down(
    install: Install, engine: Source, source: str, problem: str
) -> None:
    install("broken", "0.3", "broken_plugin", source)
    install("acme", "1.2", "acme_plugin", engine("tiny"))
    manager = load_plugins()
    assert problems(manager) == [problem]
    assert manager.engine("tiny")


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('    name = "tiny"\n', "", "it has no `name` (text)"),
        ('    name = "tiny"\n', "    name = 3\n", "it has no `name` (text)"),
        ("    Config = Config\n", "", "it has no `Config` (a pydantic model, subclass of BaseModel)"),
        (
            "    Config = Config\n",
            "    Config = dict\n",
            "it has no `Config` (a pydantic model, subclass of BaseModel)",
        ),
        ("    async def drain(self): ...\n    async def close(self): ...\n", "", "it lacks close, drain"),
    ],
)
def test_a_class_that_breaks_the_contract_is_left_out_and_says_what_it_lacks(
    install: Install, engine: Source, old: str, new: str, why: str
) -> None:
    install("acme", "1.2", "acme_plugin", engine("tiny").replace(old, new))
    manager = load_plugins()
    assert problems(manager) == [
        "plugin acme (acme 1.2): its hook pdd_register_engines registered acme_plugin.Tiny, which is no engine\n"
        f"  why: {why}\n  fix: see the contract, pdd_runtime.plugins.engine.Engine"
    ]
    assert manager.registered == []


def test_a_handoff_strategy_keeps_the_common_settings(install: Install) -> None:
    source = (
        "from pydantic import BaseModel\nfrom pdd_runtime.plugins import hookimpl\n"
        "from pdd_runtime.plugins.handoff import HandoffStrategy\n"
        "class Mine(HandoffStrategy):\n    name = 'mine'\n    Config = BaseModel\n    def step(self, view): ...\n"
        "@hookimpl\ndef pdd_register_handoff_strategies():\n    return [Mine]\n"
    )
    install("acme", "1.2", "acme_plugin", source)
    assert "subclass of HandoffConfig" in problems(load_plugins())[0]


def test_two_plugins_of_one_name_are_an_error_that_names_both(install: Install, engine: Source) -> None:
    install("acme", "1.2", "acme_plugin", engine("tiny", "Small"))
    install("other-engines", "0.1", "other_plugin", engine("tiny", "Little"))
    manager = load_plugins()
    clash = (
        '2 plugins bring an engine called "tiny"\n'
        "  why: acme_plugin.Small of plugin acme (acme 1.2) and "
        "other_plugin.Little of plugin other-engines (other-engines 0.1)\n"
        "  fix: uninstall one of acme, other-engines, or choose plugins with PDD_PLUGINS"
    )
    assert clash in problems(manager)
    assert refusal(manager.engine, "tiny") == clash


def test_one_name_may_serve_two_kinds(install: Install, engine: Source) -> None:
    policy = (
        "\nfrom pdd_runtime.plugins.routing import RoutingPolicy\n"
        "class Policy(RoutingPolicy):\n    name = 'tiny'\n    Config = Config\n    def plan(self, facts, view): ...\n"
        "@hookimpl\ndef pdd_register_routing_policies():\n    return [Policy]\n"
    )
    install("acme", "1.2", "acme_plugin", engine("tiny") + policy)
    manager = load_plugins()
    assert problems(manager) == []
    assert manager.engine("tiny").__name__ == "Tiny"
    assert manager.routing("tiny").__name__ == "Policy"


@pytest.mark.parametrize("point", ["tiny", "tiny-engine", "engine"])
def test_lazily_only_what_is_asked_for_is_imported(install: Install, engine: Source, point: str) -> None:
    install("acme", "1.2", "acme_plugin", engine("tiny"), point)
    install("other-engines", "0.1", "other_plugin", engine("large"))
    manager = load_plugins(lazily=True)
    assert not {"acme_plugin", "other_plugin"} & set(sys.modules)
    assert manager.engine("tiny").__module__ == "acme_plugin"
    assert "other_plugin" not in sys.modules
    assert manager.engine("large").__module__ == "other_plugin"
    assert manager.engine("tiny").__module__ == "acme_plugin"


def test_lazily_as_well_an_unknown_name_is_answered_with_all_there_is(install: Install, engine: Source) -> None:
    install("acme", "1.2", "acme_plugin", engine("tiny"))
    install("broken", "0.3", "broken_plugin", "import no_such_module\n")
    for name in ("tinny", "broken"):
        assert refusal(load_plugins(lazily=True).engine, name) == refusal(load_plugins().engine, name)


def test_lazily_as_well_two_plugins_of_one_name_are_an_error(install: Install, engine: Source) -> None:
    install("acme", "1.2", "acme_plugin", engine("tiny", "Small"), "tiny")
    install("other-engines", "0.1", "other_plugin", engine("tiny", "Little"), "tiny")
    assert refusal(load_plugins(lazily=True).engine, "tiny").startswith('2 plugins bring an engine called "tiny"')


def test_an_unknown_name_gets_the_nearest_the_list_and_what_to_install(install: Install, engine: Source) -> None:
    install("acme", "1.2", "acme_plugin", engine("tiny"))
    manager = load_plugins()
    assert refusal(manager.engine, "tinny") == (
        'no installed plugin brings an engine called "tinny"\n'
        "  why: the engines are: tiny; PDD_PLUGINS leaves out all plugins but acme\n"
        '  fix: did you mean "tiny"? Else install the distribution that brings it; `pdd-runtime plugins` then lists '
        "it, or what is wrong with it"
    )
    assert refusal(manager.transport, "carrier-pigeon").startswith(
        'no installed plugin brings a transport called "carrier-pigeon"\n  why: the transports are: none'
    )


def test_the_name_of_a_broken_plugin_is_answered_with_what_is_wrong(install: Install) -> None:
    install("tiny", "1.2", "tiny_plugin", "import no_such_module\n")
    assert "why: plugin tiny (tiny 1.2) cannot be imported; " in refusal(load_plugins().engine, "tiny")


def test_an_environment_variable_isolates_plugins(
    install: Install, engine: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme", "1.2", "acme_plugin", engine("tiny"))
    install("broken", "0.3", "broken_plugin", "import no_such_module\n")
    monkeypatch.setenv("PDD_PLUGINS", "acme, acmee")
    manager = load_plugins()
    assert [entry.name for entry in manager.registered] == ["tiny"]
    assert problems(manager) == ['PDD_PLUGINS names a plugin that is not installed: acmee\n  fix: did you mean "acme"?']
    monkeypatch.setenv("PDD_PLUGINS", "")
    assert load_plugins().registered == []


def test_two_managers_share_nothing(install: Install, engine: Source) -> None:
    install("acme", "1.2", "acme_plugin", engine("tiny"))
    first, second = load_plugins(), load_plugins()
    first.registered.clear()
    assert second.engine("tiny")


class _Ends(BaseModel):
    low: int = 0
    high: int

    @model_validator(mode="after")
    def _ordered(self) -> _Ends:
        if self.low > self.high:
            raise ValueError("low is above high")
        return self


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"treads": 2},
            'g.yaml:9:1: engine tiny has no setting "treads"\n  why: its settings are: threads, device\n'
            '  fix: did you mean "threads"?',
        ),
        (
            {"threads": "many"},
            "g.yaml:9:1: setting \"threads\" of engine tiny is 'many'\n"
            "  why: it should be a valid integer, unable to parse string as an integer\n"
            "  fix: leave it out for the default, 1",
        ),
    ],
)
def test_a_wrong_config_names_the_setting(
    install: Install, engine: Source, config: dict[str, object], message: str
) -> None:
    install("acme", "1.2", "acme_plugin", engine("tiny"))
    manager = load_plugins()
    with pytest.raises(PluginError) as caught:
        manager.configure(manager.engine("tiny"), config, "g.yaml:9:1")
    assert str(caught.value) == message
    assert manager.configure(manager.engine("tiny"), {"threads": 2}, "").model_dump() == {"threads": 2, "device": "cpu"}


def test_settings_that_are_missing_or_do_not_fit_are_told(
    install: Install, engine: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme", "1.2", "acme_plugin", engine("tiny"))
    manager = load_plugins()
    tiny = manager.engine("tiny")
    monkeypatch.setattr(tiny, "Config", _Ends)
    with pytest.raises(PluginError, match='engine tiny needs the setting "high"'):
        manager.configure(tiny, {}, "")
    with pytest.raises(PluginError, match="the settings of engine tiny do not fit together\n  why: low is above high"):
        manager.configure(tiny, {"low": 2, "high": 1}, "")
    # A Config that forgot to forbid unknown keys is no way around the check.
    with pytest.raises(PluginError, match='has no setting "hihg"'):
        manager.configure(tiny, {"high": 1, "hihg": 1}, "")


def test_every_hook_has_a_kind_and_a_sentence() -> None:
    from pdd_runtime.plugins import hookspecs

    hooks = {name: value for name, value in vars(hookspecs).items() if name.startswith("pdd_")}
    assert sorted(hooks) == sorted(kind.hook for kind in KINDS)
    assert all(hook.__doc__ for hook in hooks.values())


def test_the_core_names_no_plugin() -> None:
    # Built-ins register through entry points; only the modules that hold them may say their names, and the graph's
    # form as its defaults.
    core = Path(pdd_runtime.__file__).parent
    own = {"pipeline/routing_policies.py", "pipeline/handoff_strategies.py", "discovery/local.py", "graph/models.py"}
    names = re.compile(
        r"""["'](torch|tcp|rdma|scripted|hit-threshold|always-relay|never-relay|one-shot|catch-up|kv-transfer)["']"""
        r"""|^\s*(import|from) (torch|pdd_torch|pdd_tcp|pdd_rdma)\b""",
        re.MULTILINE,
    )
    found = [
        f"{path.relative_to(core)}: {match[0]}"
        for path in sorted(core.rglob("*.py"))
        if str(path.relative_to(core)) not in own and path.parent.name != "testing"
        for match in names.finditer(path.read_text())
    ]
    assert found == []
