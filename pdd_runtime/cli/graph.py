"""`pdd-runtime graph`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pdd_runtime.cli.console import Consoles
from pdd_runtime.cli.dot import dot
from pdd_runtime.cli.mermaid import mermaid
from pdd_runtime.cli.picture import picture
from pdd_runtime.cli.svg import svg
from pdd_runtime.graph import load

_DRAWN = {"mermaid": mermaid, "dot": dot, "svg": svg}


def draw(path: Path, overrides: Sequence[str], form: str, consoles: Consoles) -> None:
    loaded = load(path, overrides)
    if form == "text":
        consoles.out.print(picture(loaded.graph))
    elif form == "json":
        consoles.json(json.loads(loaded.to_json()))
    else:
        consoles.out.out(_DRAWN[form](loaded.graph), end="", highlight=False)
