"""Workloads as they are written: a file, a name, or a short text."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from pdd_runtime.errors import PddError
from pdd_runtime.graph import nearest
from pdd_runtime.graph.document import Document, parse
from pdd_runtime.planner.distribution import split
from pdd_runtime.planner.traces import Trace
from pdd_runtime.planner.workload import Workload
from pdd_runtime.planner.workload_error import WorkloadError

_LARGEST = 1 << 20
"""Bytes of a workload file."""
_PRESETS = Path(__file__).parent / "workloads"


def read_workload(spec: str) -> Workload:
    """The workload in a YAML or JSON file, of a name that is known (`presets`), or in a short text as
    `prompt=1000,output=100,rate=0.5`. Raises `WorkloadError`."""
    path = Path(spec)
    if not path.exists():
        if "=" in spec:
            return _built(_short(spec), None, Path())
        if spec in presets():
            path = _PRESETS / f"{spec}.yaml"
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise WorkloadError(
            "the workload cannot be read",
            where=spec,
            why=getattr(error, "strerror", None) or str(error),
            fix="name a YAML or JSON file, or one that is known: "
            f"{', '.join(presets())}; or write it as prompt=1000,output=100,rate=0.5",
        ) from error
    if not text.strip():
        raise WorkloadError("the workload is empty", where=spec, fix="docs/workloads.md has its keys")
    try:
        document = parse(text, spec)
    except PddError as error:
        what = error.what.replace("the graph is", "the workload is")
        raise WorkloadError(what, where=error.where, why=error.why, fix="docs/workloads.md has examples") from error
    return _built(document.data, document, path.parent)


def presets() -> list[str]:
    """The names of workloads that come along."""
    return sorted(path.stem for path in _PRESETS.glob("*.yaml"))


def summary(preset: str) -> str:
    """What a workload that comes along is like: the comment it begins with."""
    lines = (_PRESETS / f"{preset}.yaml").read_text().splitlines()
    return " ".join(line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), lines))


def _short(spec: str) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for part in split(spec):
        key, equals, value = (text.strip() for text in part.partition("="))
        if not (key and equals and value):
            raise WorkloadError(f'"{part.strip()}" is no KEY=VALUE', where="--workload", fix="write e.g. prompt=1000")
        if key in data:
            raise WorkloadError(f'"{key}" stands twice', where="--workload", fix="keep one of them")
        data[key] = value
    return data


def _built(data: Mapping[str, Any], document: Document | None, directory: Path) -> Workload:
    try:
        workload = Workload.model_validate(dict(data))
    except ValidationError as error:
        raise _told(error.errors(include_url=False)[0], document) from None
    if workload.trace is None:
        return workload
    found = workload.model_copy(update={"trace": workload.trace.beside(directory)})
    # What is wrong with a trace's beginning is said now, before anything is brought up for it.
    next(found.stream(0), None)
    return found


def _told(fault: ErrorDetails, document: Document | None) -> WorkloadError:
    keys = tuple(step for step in fault["loc"] if step in Workload.model_fields or step in Trace.model_fields)
    key = ".".join(str(step) for step in keys)
    reason = fault.get("ctx", {}).get("error")
    why = str(reason) if reason else str(fault["msg"]).replace("Input should", "it should")
    if fault["type"] == "extra_forbidden":
        unknown, known = str(fault["loc"][-1]), Trace.model_fields if len(fault["loc"]) > 1 else Workload.model_fields
        return WorkloadError(
            f'unknown key "{unknown}" in the workload',
            where=document.locate_key((*keys, unknown)) if document else "--workload",
            why=f"the keys are {', '.join(known)}",
            fix=nearest(unknown, known) or "remove it",
        )
    return WorkloadError(
        f"{key} is {fault['input']!r}" if key else "the workload contradicts itself",
        where=document.locate(keys) if document else "--workload",
        why=why,
    )
