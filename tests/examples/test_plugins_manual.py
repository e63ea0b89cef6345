"""docs/plugins.md has every hook and every method of the contracts, and its code is the example's."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from pdd_runtime.plugins import hookspecs
from pdd_runtime.plugins.manager import KINDS, Kind
from pdd_runtime.plugins.transport import BlockSink, BlockSource, Feed, TransportContext
from pdd_runtime.testing.checking import SUITES

ROOT = Path(__file__).resolve().parents[2]
MANUAL = (ROOT / "docs" / "plugins.md").read_text()
EXAMPLE = ROOT / "examples" / "shortest_queue"


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n.*?(?=^## |\Z)", MANUAL, re.MULTILINE | re.DOTALL)
    assert found, f"no section {title!r}"
    return found[0]


def blocks(text: str) -> list[str]:
    return re.findall(r"^```(?:toml|python|yaml)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def public(cls: type[Any]) -> list[str]:
    """What a class asks of who implements it, or gives to who uses it."""
    names = {name for name in vars(cls) if inspect.isfunction(vars(cls)[name])}
    names |= {name for name, kind in inspect.get_annotations(cls).items() if "ClassVar" in str(kind)}
    return sorted(name for name in names if not name.startswith("_"))


def test_every_hook_is_there() -> None:
    hooks = [name for name in vars(hookspecs) if name.startswith("pdd_register_")]
    assert len(hooks) == len(KINDS)
    for hook in hooks:
        assert f"`{hook}`" in MANUAL


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.noun)
def test_every_contract_has_a_section_with_all_its_methods(kind: Kind) -> None:
    text = section(kind.noun.capitalize())
    assert f"`{kind.base.__module__}.{kind.base.__name__}`" in text
    assert f"`{kind.hook}`" in text
    assert f"`{SUITES[kind.noun].replace(':', '.')}`" in text
    names = public(kind.base)
    assert names
    for name in names:
        called = rf"`{name}\(" if inspect.isfunction(vars(kind.base).get(name)) else f"`{name}`"
        assert re.search(called, text), f"{kind.noun}: {name}"


@pytest.mark.parametrize("cls", [BlockSource, Feed, BlockSink, TransportContext], ids=lambda cls: cls.__name__)
def test_what_a_transport_is_given_is_told_of(cls: type[Any]) -> None:
    names = public(cls)
    assert names
    for name in names:
        assert f"`{cls.__name__}.{name}(" in section("Transport")


@pytest.mark.parametrize(
    "file", ["pyproject.toml", "pdd_shortest_queue.py", "tests/test_shortest_queue.py", "graph.yaml"]
)
def test_the_walks_code_is_the_examples(file: str) -> None:
    text = (EXAMPLE / file).read_text()
    shown = [block for block in blocks(section("The walk")) if block in text]
    assert "".join(shown).replace("\n", "") == text.replace("\n", ""), f"{file} is not shown whole and in order"


def test_the_walk_shows_no_other_code() -> None:
    files = [path.read_text() for path in EXAMPLE.rglob("*") if path.suffix in (".py", ".toml", ".yaml")]
    for block in blocks(section("The walk")):
        assert any(block in text for text in files), f"no file of the example has:\n{block}"


def test_links_and_files_that_it_names_are_there() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", MANUAL):
        assert (ROOT / "docs" / link).exists(), link
    for path in re.findall(r"`((?:pdd_runtime|plugins)/[\w/.]+)`", MANUAL):
        assert (ROOT / path).exists(), path
