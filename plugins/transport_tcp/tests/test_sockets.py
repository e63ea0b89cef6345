"""Sockets are set to what a link needs."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from pdd_tcp.sockets import (
    LARGEST_UNSENT,
    SMALLEST_BUFFER,
    SMALLEST_UNSENT,
    UNSENT_INSIDE,
    tune_receiver,
    tune_sender,
    way_of,
)

from pdd_runtime.plugins.transport import LinkFacts

WAN = LinkFacts("wan", 200e6, 0.05, 8)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            yield near, far


def congestion(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()


def unsent(sock: socket.socket) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)


def test_on_a_link_bbr_is_used_where_there_is_one(pair: tuple[socket.socket, socket.socket]) -> None:
    here = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    tune_sender(pair[0], WAN, 8, "auto")
    assert congestion(pair[0]) == ("bbr" if "bbr" in here else "cubic")
    tune_sender(pair[0], WAN, 8, "reno")
    assert congestion(pair[0]) == "reno"


def test_a_congestion_control_that_is_not_there_is_named_and_the_default_stays(
    pair: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    before = congestion(pair[0])
    with caplog.at_level(logging.WARNING):
        tune_sender(pair[0], WAN, 8, "none_such")
    assert "no congestion control none_such" in caplog.text
    assert congestion(pair[0]) == before


def test_inside_a_cluster_the_hosts_congestion_control_stays(pair: tuple[socket.socket, socket.socket]) -> None:
    before = congestion(pair[0])
    tune_sender(pair[0], None, 4, "reno")
    assert congestion(pair[0]) == before


@pytest.mark.parametrize(("other", "nbytes"), [("127.0.0.1", UNSENT_INSIDE), ("127.0.0.2", LARGEST_UNSENT)])
def test_inside_a_host_less_is_left_to_the_kernel(other: str, nbytes: int) -> None:
    with (
        socket.create_server((other, 0)) as server,
        socket.create_connection(server.getsockname(), source_address=("127.0.0.1", 0)) as sock,
    ):
        tune_sender(sock, None, 4, "auto")
        assert unsent(sock) == nbytes


@pytest.mark.parametrize(
    ("bandwidth", "streams", "nbytes"),
    [(200e6, 8, 31_250), (1e6, 8, SMALLEST_UNSENT), (100e9, 4, LARGEST_UNSENT), (200e6, 1, 250_000)],
)
def test_the_kernel_holds_back_10_ms_of_a_stream_s_share(
    pair: tuple[socket.socket, socket.socket], bandwidth: float, streams: int, nbytes: int
) -> None:
    tune_sender(pair[0], LinkFacts("wan", bandwidth, 0.05, streams), streams, "auto")
    assert unsent(pair[0]) == nbytes


def test_buffers_hold_twice_a_stream_s_share_of_what_is_under_way(pair: tuple[socket.socket, socket.socket]) -> None:
    """The kernel doubles what it is told, for its own needs."""
    tune_sender(pair[0], WAN, 2, "auto")
    tune_receiver(pair[1], WAN, 2)
    wanted = 2 * 200e6 / 8 * 0.05 / 2
    assert pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * int(wanted)
    assert pair[1].getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == 2 * int(wanted)
    tune_sender(pair[0], LinkFacts("short", 1e6, 0.001, 8), 8, "auto")
    assert pair[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == 2 * SMALLEST_BUFFER


def test_the_kernel_tells_the_round_trip(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].sendall(b"x" * 1000)
    assert pair[1].recv(1000)
    way = way_of(pair[0])
    assert way is not None
    assert 0.0 < way.rtt < 10.0
    assert way.retransmits >= 0
    near, far = socket.socketpair()
    with contextlib.closing(near), contextlib.closing(far):
        assert way_of(near) is None
