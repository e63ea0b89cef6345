from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from pdd_runtime.errors import PluginError
from pdd_runtime.plugins.settings import configure
from pdd_runtime.server.config import ServerConfig


def config(**settings: Any) -> ServerConfig:
    made = configure("engine stock", ServerConfig, settings, "graph.yaml:7:1")
    assert isinstance(made, ServerConfig)
    return made


def test_a_server_is_started_by_default_with_our_own_interpreter() -> None:
    assert config().interpreter == sys.executable
    assert config(python="~/venv/bin/python").interpreter == str(Path("~/venv/bin/python").expanduser())
    assert config(python="python3").interpreter == "python3"


def test_quantities_are_written_as_everywhere() -> None:
    made = config(start_timeout="2min", kv_memory="2GiB", engine_kv_memory="8GB")
    assert (made.start_timeout, made.kv_memory, made.engine_kv_memory) == (120.0, 2 * 2**30, 8 * 10**9)
    assert ServerConfig.model_validate_json(made.model_dump_json()) == made


@pytest.mark.parametrize(
    ("url", "as_kept"),
    [
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("http://localhost:8000", "http://localhost:8000"),
        ("http://[::1]:8000", "http://[::1]:8000"),
        ("https://engine.example", "https://engine.example"),
    ],
)
def test_a_running_server_is_on_this_host_or_behind_https(url: str, as_kept: str) -> None:
    assert config(url=url, socket="/run/pdd/engine.sock").url == as_kept


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"url": "http://10.0.0.7:8000", "socket": "/s"}, "leaves this host in the clear"),
        ({"url": "http://127.0.0.1:8000/v1", "socket": "/s"}, "more than scheme, host and port"),
        ({"url": "http://user@127.0.0.1:8000", "socket": "/s"}, "more than scheme, host and port"),
        ({"url": "http://127.0.0.1:99999", "socket": "/s"}, "no right port"),
        ({"url": "127.0.0.1:8000", "socket": "/s"}, "not an address"),
        ({"url": "http://127.0.0.1:8000"}, "url needs socket"),
        ({"socket": "/s"}, "socket goes with url"),
        ({"url": "http://127.0.0.1:8000", "socket": "s"}, "the whole path"),
        ({"url": "http://127.0.0.1:8000", "socket": "/" + "s" * 107}, "at most 107 bytes"),
        ({"url": "http://127.0.0.1:8000", "socket": "/s", "port": 8000}, "url and port"),
        ({"url": "http://127.0.0.1:8000", "socket": "/s", "args": ["--seed=1"]}, "url and args"),
        ({"python": "venv/bin/python"}, "write the whole path"),
        ({"env": {"A B": "1"}}, "'A B' is not the name"),
        ({"args": ["a\0b"]}, "NUL"),
        ({"args": ["--config=/etc/server.yaml"]}, "write them into args"),
        ({"start_timeout": 3}, "is not a duration"),
        ({"tp": 0}, "greater than or equal to 1"),
        ({"kv_memory": "0B"}, "greater than 0"),
        ({"port": 65536}, "less than or equal to 65535"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(PluginError) as caught:
        config(**settings)
    assert why in f"{caught.value}"
