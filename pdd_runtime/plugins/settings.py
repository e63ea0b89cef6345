"""A plugin's settings, checked against its `Config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError

from pdd_runtime.errors import PluginError
from pdd_runtime.graph import nearest
from pdd_runtime.graph.faults import default_of
from pdd_runtime.graph.secrets import redacted
from pdd_runtime.hiding import HIDDEN

Place = str | Callable[[tuple[str | int, ...]], str]
"""Where a config stands, for messages; or a function that says where one of its settings does."""


def configure(owner: str, form: type[BaseModel], config: Mapping[str, Any], where: Place) -> BaseModel:
    """`config` checked and completed by `form`, for messages about `owner`. Raises `PluginError`."""

    def place(*route: str | int) -> str:
        return where if isinstance(where, str) else where(route)

    known = [field.alias or name for name, field in form.model_fields.items()]
    if form.model_config.get("extra") != "allow":
        for key in config:
            if key not in known:
                raise PluginError(
                    f'{owner} has no setting "{key}"',
                    where=place(key),
                    why=f"its settings are: {', '.join(known)}" if known else "it has no settings",
                    fix=nearest(str(key), known) or "remove it",
                )
    try:
        return form.model_validate(dict(config))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        setting = ".".join(str(step) for step in first["loc"])
        why = str(first.get("ctx", {}).get("error", first["msg"])).replace("Input should", "it should")
        if first["type"] == "missing":
            what, why = f'{owner} needs the setting "{setting}"', "it has no default"
        elif setting:
            shown = HIDDEN if _is_secret(form, first["loc"]) else redacted(first["input"], str(first["loc"][-1]))
            what = f'setting "{setting}" of {owner} is {shown!r}'
        else:
            what = f"the settings of {owner} do not fit together"
        names = {field.alias or name: field for name, field in form.model_fields.items()}
        field = names.get(str(first["loc"][0])) if first["loc"] else None
        fix = default_of(field) or f"`pdd-runtime plugins --format json` has the settings of {owner}"
        if first["type"] == "missing":
            fix = f"add {setting} to its config"
        raise PluginError(what, where=place(*first["loc"]), why=why, fix=fix) from error
    except Exception as error:
        # A check of the plugin's own that did not foresee this value.
        raise PluginError(
            f"{owner} cannot check its settings",
            where=place(),
            why=f"{type(error).__name__}: {' '.join(str(error).split())}",
            fix="report it to its authors, with the settings",
        ) from error


def secret_fields(form: type[BaseModel]) -> list[str]:
    """The settings that are declared as pydantic's `SecretStr` or `SecretBytes`, as the graph writes them."""
    return [field.alias or name for name, field in form.model_fields.items() if _has_secret(field.annotation)]


def _is_secret(form: type[BaseModel], location: Sequence[str | int]) -> bool:
    return bool(location) and location[0] in secret_fields(form)


def _has_secret(kind: Any) -> bool:
    return kind in (SecretStr, SecretBytes) or any(map(_has_secret, get_args(kind)))
