"""Write the tables of docs/graph.md anew from the models and the plugins' settings: `python docs/generate.py`.

With `--check` nothing is written; the exit code is 1 when the manual is not up to date. A table stands between the
lines `<!-- keys of NAME -->` and `<!-- end -->`, where NAME is a form of the graph, or `settings`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from pdd_runtime.graph import models
from pdd_runtime.graph.units import write_duration, write_size
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.schema import settings_schema

MANUAL = Path(__file__).parent / "graph.md"
DISTRIBUTIONS = ("pdd-runtime", "pdd-tcp", "pdd-torch")
_BLOCK = re.compile(r"(<!-- keys of (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def generated(text: str) -> str:
    """The manual with every table as it should be."""
    return _BLOCK.sub(lambda block: f"{block[1]}{_table(block[2])}{block[3]}", text)


def named(text: str) -> list[str]:
    """What the manual has a table of."""
    return [block[2] for block in _BLOCK.finditer(text)]


def _table(name: str) -> str:
    if name == "settings":
        return "\n".join(_settings())
    form = getattr(models, name)
    if not form.model_fields:
        return ""
    rows = [
        f"| `{field.alias or key}` | {_default(field)} | {' '.join((field.description or '').split())} |"
        for key, field in form.model_fields.items()
    ]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]) + "\n"


def _default(field: Any) -> str:
    value = field.default
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, models.PluginRef):
        return f"`{{plugin: {value.plugin}}}`"
    if value in (None, (), {}) or isinstance(value, BaseModel):
        return "–"
    if isinstance(value, float) and value == 0.0:
        return f"`{write_duration(0.0)}`"
    return f"`{json.dumps(value) if isinstance(value, bool) else value}`"


def _settings() -> Iterator[str]:
    """Every setting of the plugins that come with the project."""
    entries = [entry for entry in load_plugins().registered if entry.origin.distribution in DISTRIBUTIONS]
    for entry in sorted(entries, key=lambda entry: (entry.kind.noun, entry.name)):
        properties = settings_schema(entry.cls.Config).get("properties", {})
        yield f"### {entry.kind.noun.capitalize()} `{entry.name}` ({entry.origin.distribution})\n"
        if not properties:
            yield "No settings.\n"
            continue
        yield "| setting | default | meaning |"
        yield "|---|---|---|"
        for name, setting in properties.items():
            default = setting.get("default", PydanticUndefined)
            shown = "required" if default is PydanticUndefined else "–" if default is None else f"`{_plain(default)}`"
            yield f"| `{name}` | {shown} | {setting.get('description', '').replace('|', chr(92) + '|')} |"
        yield ""


def _plain(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 20 and value % (1 << 20) == 0:
        return write_size(value)
    return value if isinstance(value, str) and value else json.dumps(value)


def main() -> int:
    text = MANUAL.read_text()
    wanted = generated(text)
    if text == wanted:
        return 0
    if "--check" in sys.argv:
        print(f"{MANUAL} is not up to date: run `python docs/generate.py`", file=sys.stderr)
        return 1
    MANUAL.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
