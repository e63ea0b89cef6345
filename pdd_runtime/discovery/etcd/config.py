"""The settings of the `etcd` discovery: where its servers are, and how they are spoken to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from pdd_runtime.errors import PluginError

PASSWORD = "PDD_ETCD_PASSWORD"
"""Environment: the user's password, where no file has it."""


def _endpoint(text: str) -> str:
    scheme, mark, rest = text.rpartition("://")
    host, colon, port = rest.rstrip("/").rpartition(":")
    if (mark and scheme not in ("http", "https")) or not colon or not host or not port.isdecimal():
        raise ValueError("write http://HOST:PORT or https://HOST:PORT")
    return f"{scheme or 'http'}://{host}:{port}"


def _prefix(text: str) -> str:
    if not text.startswith("/") or text.endswith("/"):
        raise ValueError("it begins with / and does not end with it")
    return text


Endpoint = Annotated[str, AfterValidator(_endpoint)]


@dataclass(frozen=True)
class Certificates:
    """PEM."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None


class EtcdConfig(BaseModel, extra="forbid", frozen=True, use_attribute_docstrings=True):
    """The password of `user` comes from a file or from the environment, never from the graph."""

    endpoints: tuple[Endpoint, ...] = Field(min_length=1, max_length=64)
    """Servers of one etcd, tried in turn: `http://HOST:PORT`, or `https://` for TLS."""
    prefix: Annotated[str, AfterValidator(_prefix)] = "/pdd"
    """What every key begins with; the graph's name follows."""
    user: str | None = None
    """Who to be there; its password is in PDD_ETCD_PASSWORD or in `password_file`."""
    password_file: Path | None = None
    """A file with the password of `user`."""
    ca: Path | None = None
    """Certificates (PEM) that the servers' must be signed by; without, those that the system trusts."""
    cert: Path | None = None
    """The own certificate (PEM), where the servers ask for one."""
    key: Path | None = None
    """Its key (PEM)."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key go together")
        if self.password_file is not None and self.user is None:
            raise ValueError("password_file has the password of a user: set user, too")
        if (self.ca or self.cert) and not all(endpoint.startswith("https://") for endpoint in self.endpoints):
            raise ValueError("certificates are for TLS: write every endpoint as https://")
        return self

    def password(self) -> str:
        """Of `user`. Raises `PluginError`."""
        if self.password_file is not None:
            return _read(self.password_file, "password_file").decode().strip()
        if not (password := os.environ.get(PASSWORD)):
            raise PluginError(
                f"the password of etcd user {self.user} is not known",
                why=f"neither {PASSWORD} nor password_file is set",
                fix=f"export {PASSWORD}, or name a file in spec.discovery.config.password_file",
            )
        return password

    def certificates(self) -> Certificates:
        """The files' contents, read anew at each call: certificates are renewed. Raises `PluginError`."""
        ca, cert, key = (
            _read(path, name) if path else None
            for name, path in (("ca", self.ca), ("cert", self.cert), ("key", self.key))
        )
        return Certificates(ca, cert, key)


def _read(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PluginError(
            f"a file of discovery etcd cannot be read: {setting}",
            where=str(path),
            why=error.strerror or str(error),
            fix=f"correct spec.discovery.config.{setting}",
        ) from error
