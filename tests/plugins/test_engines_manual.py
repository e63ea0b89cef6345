"""docs/engines.md says of each engine what the engine itself promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.engine import Capabilities, ModelSpec

ROOT = Path(__file__).parents[2]
MANUAL = (ROOT / "docs/engines.md").read_text()
CAPABILITIES = {
    "logprobs": ("logprobs",),
    "seeds, the same with and without a handoff": ("seeded", "position_keyed_sampling"),
    "penalties, guided output": ("penalties", "guided"),
    "`min_tokens`": ("min_tokens",),
    "`logit_bias`": ("logit_bias",),
    "exact mode": ("exact",),
}


def table(section: str) -> dict[str, dict[str, str]]:
    """The first table of a section: of each row's name, the cells by their columns."""
    lines = MANUAL.partition(f"## {section}\n")[2].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    columns = [name.strip("`") for name in rows[0]]
    return {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows[2:] if len(row) == len(columns)}


ENGINES = ["llamacpp", "torch", "vllm", "sglang", "trtllm"]


def promises(engine: str) -> Capabilities:
    cls = load_plugins().engine(engine)
    promised = cls.promises(ModelSpec(source="x", mode="exact"), cls.Config())
    assert promised is not None
    return promised


@pytest.mark.parametrize("engine", ENGINES)
def test_the_manual_has_what_an_engine_promises(engine: str) -> None:
    promised, told = promises(engine), table("What each can do")
    assert told["KV"][engine] == promised.kv
    for row, names in CAPABILITIES.items():
        for name in names:
            assert told[row][engine].startswith("yes") == getattr(promised, name), f"{engine}: {name}"


def test_the_manual_has_every_engine_and_graph() -> None:
    assert re.findall(r"^\| `(\w+)` \|", MANUAL.partition("\n## ")[0], re.MULTILINE) == ENGINES
    for name in re.findall(r"\(\.\./([\w/.-]+)\)", MANUAL):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`((?:plugins|tests)/[\w/.]+)`", MANUAL):
        assert (ROOT / name).exists(), name
