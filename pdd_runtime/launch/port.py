"""The port that several processes of a graph listen on together."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self

from pdd_runtime.errors import LaunchError
from pdd_runtime.graph import Graph


class Ports:
    """The ports of a graph's frontends, kept as long as this context lasts."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._api: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def frontend(self, graph: Graph) -> int:
        """The API's, that of operators being kept as well. Raises `LaunchError` where one is in use."""
        if self._api is None:
            frontend = graph.spec.frontend
            if frontend.admin is not None and frontend.admin.port != 0:
                self._stack.enter_context(reserved(frontend.admin.host, frontend.admin.port))
            self._api = self._stack.enter_context(reserved(frontend.host, frontend.port))
        return self._api


@contextmanager
def reserved(host: str, port: int, setting: str = "spec.frontend") -> Iterator[int]:
    """Keep `port` (0: any free one) for processes of this user that bind it with SO_REUSEPORT; gives its number.
    Raises `LaunchError` where it is in use, be it by processes that share it among themselves. `setting`: the part of
    the graph that says where."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot(host, port, setting, error) from error
    with sock:
        try:
            # For this one bind only: what the last graph left closing does not hold the port, a living one does.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError as error:
            raise _cannot(host, port, setting, error) from error
        # It never listens, so the kernel gives it no connection.
        yield int(sock.getsockname()[1])


def _cannot(host: str, port: int, setting: str, error: OSError) -> LaunchError:
    in_use = error.errno == errno.EADDRINUSE
    return LaunchError(
        f"the frontend cannot listen on {host}:{port}",
        why="another process listens there" if in_use else error.strerror or str(error),
        fix=f"choose another port, --set {setting}.port=9000 (0: any that is free)"
        if in_use or error.errno == errno.EACCES
        else f"choose an address of this machine, --set {setting}.host=127.0.0.1",
    )
