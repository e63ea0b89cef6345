"""A profile: how each pool of a graph behaves, as measured or as somebody knows it. A YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pdd_runtime.errors import PddError
from pdd_runtime.graph import PluginRef
from pdd_runtime.graph.models import Name
from pdd_runtime.graph.units import Bandwidth, Duration

_LARGEST = 16 << 20
"""Bytes of a file that is read."""


class ProfileError(PddError):
    """A profile cannot be read, or does not say what is asked of it."""

    code = "profile"


class _Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class PoolProfile(_Form):
    """One worker of a pool."""

    latency: PluginRef
    """The latency model that says how long its passes take."""
    batch_limit: int = Field(default=256, ge=1)
    """Requests it decodes at once."""
    chunk: int = Field(default=8192, ge=1)
    """Prompt tokens of one pass."""
    block: int = Field(default=64, ge=1)
    """Tokens of a block."""
    capacity: int | None = Field(default=None, ge=1)
    """Tokens of KV it holds; none: what fits, where the latency model knows the memory."""
    kv_constant: float | None = Field(default=None, ge=0)
    """Bytes of KV for each request; none: as the latency model knows the model."""
    kv_token: float | None = Field(default=None, ge=0)
    """Bytes of KV for each token; none: as the latency model knows the model."""
    context_length: int | None = Field(default=None, ge=1)
    """Tokens of the longest sequence that it takes, prompt and answer together; none: as graph and model say."""
    overhead: Duration = 0.0
    """Added to each request's first token there: message plane, scheduling."""


class LinkProfile(_Form):
    """One link."""

    rtt: Duration
    """There and back."""
    goodput: Bandwidth | None = Field(default=None, gt=0)
    """Payload, in each direction; none: nothing was sent over it."""


class Profile(_Form):
    """The whole file."""

    apiVersion: Literal["pdd/v1alpha1"] = "pdd/v1alpha1"  # noqa: N815 - the YAML's key
    kind: Literal["Profile"] = "Profile"
    graph: str = ""
    """The graph that was measured."""
    measured: dict[str, str] = {}
    """When, and on what."""
    pools: dict[Name, PoolProfile] = Field(min_length=1)
    """By name, as the graph calls them."""
    links: dict[Name, LinkProfile] = {}
    """By name, as the graph calls them."""

    def to_yaml(self) -> str:
        """As it is read again."""
        data = self.model_dump(mode="json", exclude_none=True)
        return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Lists of numbers in one line: a table is to be read by people, too."""


def _list(dumper: yaml.SafeDumper, data: list[Any]) -> yaml.Node:
    flow = not any(isinstance(item, (list, dict)) for item in data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


_Dumper.add_representer(list, _list)


def read_profile(path: Path) -> Profile:
    """Raises `ProfileError`."""
    try:
        if path.stat().st_size > _LARGEST:
            raise ProfileError("the profile is too large", where=str(path), why=f"more than {_LARGEST >> 20} MiB")
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ProfileError("the profile cannot be read", where=str(path), why=error.strerror or str(error)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ProfileError("the profile is no YAML", where=str(path), why=" ".join(str(error).split())) from None
    try:
        return Profile.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in first["loc"])
        raise ProfileError(
            f"the profile is wrong{f' at {place}' if place else ''}",
            where=str(path),
            why=str(first.get("ctx", {}).get("error", first["msg"])),
            fix="`pdd-runtime profile GRAPH` writes one",
        ) from None
