"""Write the tables of docs/graph.md and docs/latency.md anew from the models and the plugins' settings, and those of
docs/cli.md from the commands: `python docs/generate.py`.

With `--check` nothing is written; the exit code is 1 when a manual is not up to date. A table stands between the
lines `<!-- keys of NAME -->` and `<!-- end -->`, where NAME is a form of the graph or of the planner, or `settings`,
those of what a graph names, or `latency settings`, those of latency models; or between
`<!-- options of COMMAND -->` and `<!-- end -->`.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import typer
from pydantic import BaseModel, PlainSerializer
from pydantic_core import PydanticUndefined
from typer.models import ArgumentInfo

from pdd_runtime.cli.app import app
from pdd_runtime.graph import models
from pdd_runtime.graph.units import write_size
from pdd_runtime.planner import hardware, model_spec, plan_spec, prices, profile, workload
from pdd_runtime.planner.traces import trace
from pdd_runtime.plugins import load_plugins
from pdd_runtime.plugins.latency import LatencyModel
from pdd_runtime.plugins.schema import settings_schema

MANUALS = tuple(
    Path(__file__).parent / name for name in ("graph.md", "cli.md", "latency.md", "planner.md", "workloads.md")
)
DISTRIBUTIONS = (
    *("pdd-llamacpp", "pdd-rdma", "pdd-runtime", "pdd-sglang", "pdd-tcp", "pdd-torch", "pdd-trtllm", "pdd-vllm"),
)
FORMS = (models, hardware, model_spec, plan_spec, prices, profile, workload, trace)
"""Modules whose forms have tables."""
_BLOCK = re.compile(r"(<!-- (?:keys|options) of (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def generated(text: str) -> str:
    """The manual with every table as it should be."""
    return _BLOCK.sub(lambda block: f"{block[1]}{_table(block[2])}{block[3]}", text)


def named(text: str) -> list[str]:
    """What the manual has a table of."""
    return [block[2] for block in _BLOCK.finditer(text)]


def _table(name: str) -> str:
    if name in ("settings", "latency settings"):
        return "\n".join(_settings(of_latency=name != "settings"))
    if (command := dict(commands(app)).get(name)) is not None:
        return "\n".join(["| option | default | meaning |", "|---|---|---|", *_options(command)]) + "\n"
    form = next(vars(module)[name] for module in FORMS if name in vars(module))
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
    if value in (None, (), {}, "") or isinstance(value, BaseModel):
        return "–"
    written = next((each for each in field.metadata if isinstance(each, PlainSerializer)), None)
    if written is not None:
        return f"`{written.func(value)}`"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{json.dumps(value) if isinstance(value, bool) else value}`"


def _settings(*, of_latency: bool) -> Iterator[str]:
    """Every setting of the plugins that come with the project: of latency models, or of all others."""
    entries = [
        entry
        for entry in load_plugins().registered
        if entry.origin.distribution in DISTRIBUTIONS and (entry.kind.base is LatencyModel) is of_latency
    ]
    for entry in sorted(entries, key=lambda entry: (entry.kind.noun, entry.name)):
        schema = settings_schema(entry.cls.Config)
        properties = schema.get("properties", {})
        yield f"### {entry.kind.noun.capitalize()} `{entry.name}` ({entry.origin.distribution})\n"
        if not properties:
            yield "No settings.\n"
            continue
        yield "| setting | default | meaning |"
        yield "|---|---|---|"
        for name, setting in properties.items():
            default = setting.get("default")
            shown = "–" if default is None else f"`{_plain(default)}`"
            shown = "required" if name in schema.get("required", ()) else shown
            yield f"| `{name}` | {shown} | {setting.get('description', '').replace('|', chr(92) + '|')} |"
        yield ""


def commands(group: typer.Typer, prefix: str = "") -> Iterator[tuple[str, Callable[..., Any]]]:
    """What runs each command; those of a group as "group name"."""
    for command in group.registered_commands:
        assert command.callback is not None
        yield prefix + (command.name or command.callback.__name__), command.callback
    for below in group.registered_groups:
        assert below.typer_instance is not None
        callback = below.typer_instance.registered_callback
        assert callback is not None
        assert callback.callback is not None
        yield f"{prefix}{below.name}", callback.callback
        yield from commands(below.typer_instance, f"{prefix}{below.name} ")


def _options(command: Callable[..., Any]) -> Iterator[str]:
    """A row for each argument and option."""
    hints: dict[str, Any] = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if not (told := [more for more in getattr(hints[name], "__metadata__", ()) if hasattr(more, "help")]):
            continue
        info, kind = told[0], hints[name].__origin__
        if isinstance(info, ArgumentInfo):
            names = [str(info.metavar)]
        else:
            # Inside `Annotated` the first name stands where a default would.
            names = [one for declared in (info.default, *info.param_decls) for one in declared.split("/")]
            names[0] += f" {info.metavar}" if info.metavar else " N" if kind is int else ""
        choices = f" One of {', '.join(kind)}." if isinstance(kind, type) and issubclass(kind, Enum) else ""
        default = f"`{names[0]}`" if parameter.default is True else _unset(parameter.default)
        cells = (", ".join(f"`{name}`" for name in names), default, f"{info.help}{choices}")
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _unset(default: object) -> str:
    if default is inspect.Parameter.empty:
        return "required"
    if default is None or isinstance(default, bool):
        return "–"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


def _plain(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 20 and value % (1 << 20) == 0:
        return write_size(value)
    return value if isinstance(value, str) and value else json.dumps(value)


def main() -> int:
    wrong = [manual for manual in MANUALS if generated(manual.read_text()) != manual.read_text()]
    for manual in wrong:
        if "--check" in sys.argv:
            print(f"{manual} is not up to date: run `python docs/generate.py`", file=sys.stderr)
        else:
            manual.write_text(generated(manual.read_text()))
    return 1 if wrong and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
