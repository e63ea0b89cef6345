"""What comes on a socket is taken in few pieces, and is all taken."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator

import pytest
from pdd_tcp import sockets
from pdd_tcp.sockets import MOST_AT_ONCE, Cut, Intake, set_up

PATIENCE = 30.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Where it comes out, and where it goes in."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            set_up(near, PATIENCE)
            yield near, far


def test_a_thread_sleeps_until_all_that_it_waits_for_is_there(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "WHILE", PATIENCE)
    """Of as many as the kernel can hold from the start."""
    intake, memory = Intake(pair[0], PATIENCE), memoryview(bytearray(32 << 10))
    pair[1].sendall(bytes(1000))
    sender = threading.Thread(target=pair[1].sendall, args=(b"x" * (len(memory) - 1000),))
    sender.start()
    intake.wait(len(memory))
    assert intake.take(memory) == len(memory)
    sender.join()


def test_what_comes_late_is_waited_for_no_longer_than_a_while(pair: tuple[socket.socket, socket.socket]) -> None:
    """The rest does not come before this has been taken."""
    intake, memory = Intake(pair[0], PATIENCE), memoryview(bytearray(MOST_AT_ONCE))
    pair[1].sendall(b"some")
    intake.wait(MOST_AT_ONCE)
    assert intake.take(memory) == 4
    assert intake.take(memory) == 0
    pair[1].sendall(b"rest")
    intake.wait(4)
    assert intake.take(memory[4:8], memory[8:]) == 4
    assert memory[:8] == b"somerest"


@pytest.mark.parametrize("buffer", [None, 16 << 10])
def test_all_of_it_comes_whatever_the_pieces_and_the_buffer(
    pair: tuple[socket.socket, socket.socket], buffer: int | None
) -> None:
    """A buffer that cannot hold what is waited for, too."""
    if buffer is not None:
        pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    data, pieces = random.Random(1).randbytes(3 << 20), random.Random(2)

    def send() -> None:
        at = 0
        while at < len(data):
            size = pieces.choice((1, 48, 5000, 300_000))
            pair[1].sendall(data[at : at + size])
            at += size

    sender = threading.Thread(target=send)
    sender.start()
    intake, memory = Intake(pair[0], PATIENCE), bytearray(len(data))
    view = memoryview(memory)
    for start in range(0, len(data), 700_000):
        intake.fill(view[start : start + 48])
        intake.fill(view[start + 48 : start + 700_000])
    sender.join()
    assert memory == data


def test_nothing_for_too_long_and_an_end_are_cuts(pair: tuple[socket.socket, socket.socket]) -> None:
    memory = memoryview(bytearray(8))
    with pytest.raises(Cut, match="nothing came"):
        Intake(pair[0], 0.01).fill(memory)
    pair[1].sendall(b"some")
    pair[1].shutdown(socket.SHUT_WR)
    with pytest.raises(Cut, match="closed"):
        Intake(pair[0], PATIENCE).fill(memory)
    assert memory[:4] == b"some"
