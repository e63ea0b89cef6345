from __future__ import annotations

import socket

import pytest

from pdd_runtime.errors import LaunchError
from pdd_runtime.frontend.server import listen, url


def test_a_port_in_use_is_named_with_the_way_out() -> None:
    with listen("127.0.0.1", 0) as taken, pytest.raises(LaunchError) as raised:
        listen("127.0.0.1", taken.getsockname()[1])
    text = str(raised.value)
    assert "another process listens there" in text
    assert "--set spec.frontend.port=" in text


def test_an_address_that_is_not_here_is_named() -> None:
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(LaunchError, match=r"spec\.frontend\.host"):
            listen(host, 0)


def test_a_small_chunk_never_waits_for_an_acknowledgement() -> None:
    with listen("127.0.0.1", 0) as sock, socket.create_connection(sock.getsockname()):
        connection, _ = sock.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_the_url_is_one_that_a_client_can_use() -> None:
    for host, prefix in (("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:")):
        with listen(host, 0) as sock:
            assert url(sock) == f"{prefix}{sock.getsockname()[1]}"
