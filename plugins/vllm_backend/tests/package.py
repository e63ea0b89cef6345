"""The package vLLM, as its own interpreter sees it."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from pdd_vllm import testing


def told(reader: str) -> dict[str, Any]:
    """What the Python program `reader` prints last, in JSON. Skips the test where vLLM is not installed."""
    done = subprocess.run(
        [str(testing.interpreter()), "-c", reader], capture_output=True, text=True, timeout=900, env={"PATH": "/bin"}
    )
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return facts
