from __future__ import annotations

from pathlib import Path

import pytest
from pdd_torch.testing import build_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights, as a directory."""
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny", seed=7, context=16384)
