"""Messages to the compiler process and back."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from remora.engine.grammar.frames import frame, receive

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("body", [b"\0\xff", bytes(range(256)) * 2**14])
def test_a_message_comes_back_even_if_it_is_larger_than_any_buffer(pair: Pair, body: bytes) -> None:
    sender = threading.Thread(target=pair[0].sendall, args=(frame({"a": "é"}, body),))
    sender.start()

    assert receive(pair[1], 60) == ({"a": "é"}, body)
    sender.join()


@pytest.mark.parametrize("cut", [0, 1, 7, 9, -1])
def test_a_message_cut_short_is_an_error(cut: int, pair: Pair) -> None:
    pair[0].sendall(frame({"a": 1}, b"xyz")[:cut])
    pair[0].close()

    with pytest.raises(EOFError):
        receive(pair[1], 60)


def test_a_message_behind_one_cut_short_is_not_taken_for_its_end(pair: Pair) -> None:
    pair[0].sendall(frame({}, b"x" * 9)[:-2] + frame({"error": "it died"}))

    with pytest.raises(EOFError, match="cut short"):
        receive(pair[1], 60)


def test_a_message_that_does_not_come_in_time_is_an_error(pair: Pair) -> None:
    pair[0].sendall(frame({}, b"x")[:-1])

    with pytest.raises(TimeoutError):
        receive(pair[1], 0.05)
