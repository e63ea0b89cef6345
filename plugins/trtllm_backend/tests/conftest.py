"""What the tests of the engine share: a tiny model, and a `tensorrt_llm` that is the stand-in's."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pdd_trtllm.testing.standin import SITE

from pdd_runtime.testing.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def stand_in() -> Iterator[None]:
    """`tensorrt_llm` is the stand-in's, in this process."""
    sys.path.insert(0, str(SITE))
    yield
    sys.path.remove(str(SITE))
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]
