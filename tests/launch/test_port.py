from __future__ import annotations

import socket

import pytest

from pdd_runtime.errors import LaunchError
from pdd_runtime.launch.port import reserved


def _bind(port: int, *, share: bool) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if share:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind(("127.0.0.1", port))
    except OSError:
        sock.close()
        raise
    return sock


def test_the_processes_of_a_graph_share_what_is_reserved_and_nobody_else_gets_it() -> None:
    with reserved("127.0.0.1", 0) as port:
        with pytest.raises(OSError, match="in use"):
            _bind(port, share=False)
        for listening in (False, True):
            with _bind(port, share=True) as first, _bind(port, share=True) as second:
                if listening:
                    first.listen()
                    second.listen()
                # Another graph that shares among its own does not get in either.
                with pytest.raises(LaunchError, match="cannot listen"), reserved("127.0.0.1", port):
                    pass
    with reserved("127.0.0.1", port) as again:
        assert again == port


def test_it_takes_no_connection() -> None:
    with reserved("127.0.0.1", 0) as port, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_an_address_of_another_machine_is_refused_in_words() -> None:
    with pytest.raises(LaunchError, match=r"choose an address of this machine"), reserved("192.0.2.1", 0):
        pass
