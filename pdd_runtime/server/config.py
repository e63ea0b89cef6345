"""What a pool may set for any engine that is a server of its own."""

from __future__ import annotations

import re
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ByteSize, Field, field_validator, model_validator

from pdd_runtime.graph.units import Duration
from pdd_runtime.server.flags import flag_of

_SOCKET_PATH = 107
"""Bytes that a unix socket's path may have on Linux (`sun_path` without its end); macOS takes a few less."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_OF_A_START = ("python", "port", "args", "env", "engine_kv_memory")


class ServerConfig(BaseModel, frozen=True, extra="forbid"):
    python: Path | None = None
    """The Python interpreter of the environment where the server is installed; by default the worker's own."""
    url: str | None = None
    """Attach to a server that runs already, e.g. `http://127.0.0.1:8000`: nothing is started or stopped. Needs
    `socket`."""
    socket: Path | None = None
    """With `url`: the unix socket where that server's connector was told to find the worker or, where it moves KV
    itself, where it publishes what it caches."""
    port: int = Field(0, ge=0, le=65535)
    """Where the server listens, on 127.0.0.1 alone; 0: a free one."""
    args: tuple[str, ...] = ()
    """Put at the end of the server's command line: any flag that it has can be set, but those that would make it
    disagree with its worker."""
    env: dict[str, str] = {}
    """Added to the server's environment."""
    start_timeout: Duration = 600.0
    """How long the server may take until it makes its first token."""
    health_timeout: Duration = Field(10.0, ge=1)
    """How long the server may be without an answer, or without its connector. Then it is dead, even where its process
    runs: its requests end, and it is started again."""
    stall_timeout: Duration = Field(60.0, ge=1)
    """How long none of its requests may hear of the server while it answers otherwise. Then it has to make a token of a
    small request in as long again, or is dead as well."""
    kv_wait: Duration = Field(30.0, gt=0)
    """How long a prefill waits for blocks of KV to come free. Then it fails, it alone, and can be served elsewhere."""
    tp: int = Field(1, ge=1)
    """Accelerators that share each layer (tensor parallelism)."""
    block_size: int = Field(16, ge=1, le=1024)
    """Tokens in a block."""
    kv_memory: ByteSize = Field(ByteSize(2**30), gt=0)
    """Host memory for blocks of KV that worker and server share, e.g. `64GiB`. Pages exist only once they are
    touched."""
    engine_kv_memory: ByteSize | None = Field(None, gt=0)
    """Memory for the server's own KV cache on each accelerator; by default what the server takes by itself."""
    context_length: int | None = Field(None, ge=1)
    """Refuse longer sequences than this; by default the model's own limit."""
    batch_limit: int = Field(256, ge=1)
    """Sequences computed at once; more wait."""

    @property
    def interpreter(self) -> str:
        """What starts the server's Python."""
        return str(self.python.expanduser()) if self.python else sys.executable

    @property
    def by_socket(self) -> bool:
        """Whether worker and server meet at a unix socket, beside the url."""
        return True

    @field_validator("python")
    @classmethod
    def _found_anywhere(cls, python: Path | None) -> Path | None:
        if python is not None and len(python.parts) > 1 and not python.expanduser().is_absolute():
            raise ValueError(f"write the whole path: the server starts in a directory of its own, without {python}")
        return python

    @field_validator("url")
    @classmethod
    def _reachable(cls, url: str | None) -> str | None:
        return None if url is None else check_url(url)

    @field_validator("socket")
    @classmethod
    def _short_enough(cls, socket: Path | None) -> Path | None:
        if socket is not None:
            socket = socket.expanduser()
            if not socket.is_absolute():
                raise ValueError("write the whole path: two processes, with directories of their own, must find it")
            if len(bytes(socket)) > _SOCKET_PATH:
                raise ValueError(f"the path of a unix socket has at most {_SOCKET_PATH} bytes")
        return socket

    @field_validator("args")
    @classmethod
    def _arguments(cls, args: tuple[str, ...]) -> tuple[str, ...]:
        for arg in args:
            if "\0" in arg:
                raise ValueError(f"{arg!r} has a NUL, which no command line can carry")
            if flag_of(arg, ("--config",)):
                raise ValueError("a file's flags could be any: write them into args instead of --config")
        return args

    @field_validator("env")
    @classmethod
    def _variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of an environment variable")
            if "\0" in value:
                raise ValueError(f"the value of {name} has a NUL, which no environment can carry")
        return env

    @model_validator(mode="after")
    def _attach_or_start(self) -> Self:
        if self.socket is not None and not self.by_socket:
            raise ValueError("socket is of no use here: worker and server meet at the url alone")
        if self.url is not None and self.socket is None and self.by_socket:
            raise ValueError("url needs socket: the path that the running server's connector was given")
        if self.url is None and self.socket is not None:
            raise ValueError("socket goes with url: a server that the worker starts is given a socket of the worker's")
        unused = [name for name in _OF_A_START if name in self.model_fields_set]
        if self.url is not None and unused:
            raise ValueError(f"url and {unused[0]}: nothing is started at a url, so what a start needs is of no use")
        return self


def check_second_socket(socket: Path | None, ending: str) -> None:
    """Raises `ValueError` where `ending`, behind the path of a socket, has no room."""
    if socket is not None and len(bytes(socket)) + len(ending) > _SOCKET_PATH:
        raise ValueError(f"socket: {ending} is added to the path of a second socket: it has to be shorter by that")


def check_url(url: str) -> str:
    """`url` without a slash at its end. Raises `ValueError` where it is none, or would carry prompts over a network in
    the clear."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} has no right port") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ValueError(f"{url!r} is not an address like http://127.0.0.1:8000")
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{url!r} has more than scheme, host and port")
    if parts.scheme == "http" and not _is_loopback(parts.hostname):
        raise ValueError(f"{url!r} leaves this host in the clear: use https, or an address of this host (127.0.0.1)")
    return url.rstrip("/")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
