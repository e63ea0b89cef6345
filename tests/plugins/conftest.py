from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ENGINE = """
from pydantic import BaseModel

from pdd_runtime.plugins import hookimpl
from pdd_runtime.plugins.engine import Engine


class Config(BaseModel, extra="forbid"):
    threads: int = 1
    device: str = "cpu"


class {cls}(Engine):
    name = "{name}"
    Config = Config

    async def start(self, host): ...
    def prefill(self, request): ...
    def decode(self, request): ...
    async def seal(self, request_id, tokens): ...
    async def cancel(self, request_id): ...
    async def cached(self, tokens, salt=""): ...
    async def load(self): ...
    async def tokenizer(self): ...
    async def drain(self): ...
    async def close(self): ...


@hookimpl
def pdd_register_engines():
    return [{cls}]
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution, as pip would leave it: `install("acme", "1.2", "acme_plugin", "import …")`.

    Only what is installed here is loaded, unless `PDD_PLUGINS` is changed again.
    """
    monkeypatch.syspath_prepend(tmp_path)
    names: list[str] = []

    def make(distribution: str, version: str, module: str, source: str, entry: str = "") -> None:
        monkeypatch.delitem(sys.modules, module, raising=False)
        entry = entry or distribution
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[pdd_runtime.plugins]\n{entry} = {module}\n")
        names.append(entry)
        monkeypatch.setenv("PDD_PLUGINS", ",".join(names))

    return make


@pytest.fixture
def engine() -> Callable[..., str]:
    """`engine(name, cls="Tiny")`: the source of a module that registers one engine."""
    return lambda name, cls="Tiny": ENGINE.replace("{cls}", cls).replace("{name}", name)
