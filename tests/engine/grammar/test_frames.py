"""Messages to the compiler process and back."""

from __future__ import annotations

import io

import pytest

from remora.engine.grammar.frames import frame, frame_size, read_frame


def test_messages_come_back_one_by_one() -> None:
    stream = io.BytesIO(frame({"a": "é"}, b"\0\xff") + frame({"b": 1}))

    assert read_frame(stream) == ({"a": "é"}, b"\0\xff")
    assert read_frame(stream) == ({"b": 1}, b"")
    assert read_frame(stream) is None


def test_the_size_is_known_as_soon_as_it_can_be() -> None:
    data = frame({"a": 1}, b"xyz")

    assert frame_size(data[:7]) is None
    assert frame_size(data[:8]) == len(data)


@pytest.mark.parametrize("cut", [1, 7, 9, -1])
def test_a_message_cut_short_is_an_error(cut: int) -> None:
    with pytest.raises(EOFError):
        read_frame(io.BytesIO(frame({"a": 1}, b"xyz")[:cut]))


def test_a_head_of_absurd_size_is_not_read() -> None:
    with pytest.raises(EOFError, match="none"):
        read_frame(io.BytesIO(b"\xff" * 64))
