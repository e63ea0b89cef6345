"""What the tests of the engine share: a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from pdd_llamacpp.testing import build_tiny_gguf


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf")
