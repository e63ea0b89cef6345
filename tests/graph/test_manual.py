from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pdd_runtime.graph import loads
from pdd_runtime.graph import models as forms

DOCS = Path(__file__).parents[2] / "docs"
MANUAL = (DOCS / "graph.md").read_text()


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_manuals_have_every_key_setting_and_option_with_its_default_and_meaning() -> None:
    done = subprocess.run(
        [sys.executable, DOCS / "generate.py", "--check"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_no_form_is_left_out(generate: ModuleType) -> None:
    known = {
        name
        for name, value in vars(forms).items()
        if isinstance(value, type) and issubclass(value, forms._Form) and value is not forms._Form
    }
    assert known | {"settings"} == set(generate.named(MANUAL))
    for name in known:
        assert re.search(rf"^## {name}: .*\n\n{re.escape(str(getattr(forms, name).__doc__))}", MANUAL, re.MULTILINE)


def test_a_change_of_a_model_shows(generate: ModuleType) -> None:
    assert generate.generated(MANUAL) == MANUAL
    assert generate.generated(MANUAL.replace("| `rtt` | required |", "| `rtt` | `1s` |")) == MANUAL


def test_the_manuals_graph_is_right() -> None:
    (example,) = re.findall(r"```yaml\n(apiVersion.*?)```", MANUAL, re.DOTALL)
    assert loads(example).graph.name == "quickstart"
