from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from pdd_runtime.graph import loads
from pdd_runtime.graph import models as forms
from pdd_runtime.graph.units import write_duration

MANUAL = (Path(__file__).parents[2] / "docs" / "graph.md").read_text()
FORMS = [
    forms.Graph,
    forms.Metadata,
    forms.Spec,
    forms.Model,
    forms.Cluster,
    forms.Link,
    forms.Pool,
    forms.Edge,
    forms.PluginRef,
    forms.Slo,
    forms.Frontend,
]


def rows(form: type[BaseModel]) -> list[tuple[str, str, str]]:
    """(key, default, meaning) of each row in the form's section."""
    section = re.search(rf"^## {form.__name__}\b.*?(?=^## |\Z)", MANUAL, re.MULTILINE | re.DOTALL)
    assert section, f"no section on {form.__name__}"
    return [
        (row[0], row[1], row[2]) for row in re.findall(r"^\| `(.+?)` \| (.*?) \| (.*?) \|$", section[0], re.MULTILINE)
    ]


def default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "required"
    if isinstance(field.default, forms.PluginRef):
        return f"`{{plugin: {field.default.plugin}}}`"
    if field.default in (None, (), {}) or isinstance(field.default, BaseModel):
        return "–"
    if field.default == 0.0 and isinstance(field.default, float):
        return f"`{write_duration(0.0)}`"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_manual_has_every_key_with_its_default_and_meaning(form: type[BaseModel]) -> None:
    expected = [
        (field.alias or name, default(field), " ".join((field.description or "").split()))
        for name, field in form.model_fields.items()
    ]
    assert rows(form) == expected


def test_no_form_is_left_out() -> None:
    known = {value for value in vars(forms).values() if isinstance(value, type) and issubclass(value, forms._Form)}
    assert known - {forms._Form} == set(FORMS)


def test_the_manuals_graph_is_right() -> None:
    (example,) = re.findall(r"```yaml\n(apiVersion.*?)```", MANUAL, re.DOTALL)
    assert loads(example).graph.name == "quickstart"
