"""The examples of docs/api.md, as printed, against the graph they are written for."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.integration.stack import Stack

API = Path(__file__).resolve().parents[2] / "docs" / "api.md"
PRINTED = "http://127.0.0.1:8000"
RECIPES = [
    (language, code)
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```$", API.read_text(), flags=re.MULTILINE | re.DOTALL)
    if PRINTED in code and "aiperf" not in code
]
"""Of aiperf's recipe the docs say when it was last run: it has a hundred dependencies and fetches a tokenizer."""
SAYS = ("river", "River", "data: [DONE]", "weather", '\\"country\\":')
"""One for each, in order."""

pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack("quickstart", tmp_path_factory.mktemp("state")) as stack:
        yield stack


def run(language: str, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if language == "python" else ["bash", "-c", code.removeprefix("$ ")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.timeout(300)
def test_every_recipe_works_as_printed(stack: Stack) -> None:
    assert len(RECIPES) == len(SAYS)
    with ThreadPoolExecutor(len(RECIPES)) as threads:
        # Only the port is another one: 8000 may be somebody else's here.
        runs = [threads.submit(run, language, code.replace(PRINTED, stack.url)) for language, code in RECIPES]
    for done, says in zip((run.result() for run in runs), SAYS, strict=True):
        assert done.returncode == 0, done.stderr
        assert says in done.stdout, done.stdout
        assert '"error"' not in done.stdout
