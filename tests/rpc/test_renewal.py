"""Certificates are replaced while their process runs."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pdd_runtime.errors import RpcError
from pdd_runtime.rpc import Greeting, RpcContext, RpcServer, Tls, connect
from tests.certificates import Issuer
from tests.waiting import PATIENCE

Make = Callable[..., Greeting]


def of(directory: Path) -> Tls:
    files = {name: directory / f"dc-a.{end}" for name, end in (("cert", "pem"), ("key", "key"))}
    return Tls(ca=directory / "ca.pem", **files, graph="g", cluster="dc-a")


def made(directory: Path) -> Path:
    """The files of a CA of its own, and of a certificate by it."""
    issuer = Issuer("g", directory)
    issuer.authority.issue(directory, "dc-a")
    return directory


def put(source: Path, target: Path, *names: str) -> None:
    for name in names or ("ca.pem", "dc-a.pem", "dc-a.key"):
        shutil.copy(source / name, target / f"{name}.new")
        (target / f"{name}.new").replace(target / name)


@pytest.fixture
def tls(tmp_path: Path) -> Tls:
    return of(made(tmp_path / "used"))


@pytest.fixture
async def endpoint(server: RpcServer) -> str:
    async def echo(params: str, context: RpcContext) -> str:
        return params

    server.unary("echo", str, echo)
    return await server.start("127.0.0.1")


async def test_the_next_connection_goes_by_the_new_ones_and_the_old_connection_goes_on(
    endpoint: str, tls: Tls, greeting: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    earlier = of(Path(shutil.copytree(tmp_path / "used", tmp_path / "kept")))
    old = await connect(endpoint, greeting("frontend/0"), tls=earlier, timeout=PATIENCE)
    put(made(tmp_path / "next"), tmp_path / "used")
    new = await connect(endpoint, greeting("frontend/1"), tls=of(tmp_path / "next"), timeout=PATIENCE)
    for connection in (old, new):
        assert await connection.call("echo", "hello", str, timeout=PATIENCE) == "hello"
    with pytest.raises(RpcError, match="no TLS connection"):
        await connect(endpoint, greeting("frontend/2"), tls=earlier, timeout=PATIENCE)
    both = await connect(endpoint, greeting("frontend/3"), tls=tls, timeout=PATIENCE)
    assert "the certificate was replaced: dc-a serves by" in caplog.text
    for connection in (old, new, both):
        await connection.close()


async def test_what_cannot_be_used_is_told_once_and_the_old_one_serves_on(
    endpoint: str, tls: Tls, greeting: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    client = of(Path(shutil.copytree(tmp_path / "used", tmp_path / "kept")))
    put(made(tmp_path / "next"), tmp_path / "used", "dc-a.pem")
    for _ in range(2):
        connection = await connect(endpoint, greeting("frontend/0"), tls=client, timeout=PATIENCE)
        await connection.close()
    assert caplog.text.count("was replaced, and the old one serves on") == 1
    assert "the key is not that of the certificate" in caplog.text
    put(tmp_path / "next", tmp_path / "used")
    connection = await connect(endpoint, greeting("frontend/0"), tls=of(tmp_path / "next"), timeout=PATIENCE)
    await connection.close()


def test_it_is_known_when_the_first_of_them_expires(tmp_path: Path) -> None:
    issuer = Issuer("g", tmp_path)
    issuer.authority.issue(tmp_path, "dc-a", days=0.5)
    assert 0 < of(tmp_path).expires - time.time() <= 0.5 * 86400
    issuer.authority.issue(tmp_path, "dc-a", days=300)
    assert 0 < of(tmp_path).expires - time.time() <= 86400, "that of the CA"
