"""Frames survive any split into pieces, and a truncated response is detected."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.deployments.gateway.frames import (
    MAX_BODY_BYTES,
    BrokenFrame,
    Frame,
    FrameReader,
    Kind,
    body_frames,
)

frames = st.lists(st.builds(Frame, st.sampled_from(Kind), st.binary(max_size=64)), max_size=12)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in pairwise(places)]


@given(frames, st.lists(st.integers(min_value=0)))
def test_frames_come_out_alike_however_the_bytes_are_cut(
    sent: list[Frame], cuts: list[int]
) -> None:
    reader = FrameReader()

    pieces = pieces_of(b"".join(map(bytes, sent)), cuts)

    assert [frame for piece in pieces for frame in reader.feed(piece)] == sent


@given(frames, st.integers(min_value=1, max_value=200))
def test_what_is_cut_off_never_shows_its_end(sent: list[Frame], missing: int) -> None:
    sent = [frame for frame in sent if frame.kind is not Kind.END]
    data = b"".join(map(bytes, [*sent, Frame(Kind.END, b"!" * 5)]))

    found = FrameReader().feed(data[: max(0, len(data) - missing)])

    assert Kind.END not in [frame.kind for frame in found]


@pytest.mark.parametrize("size", [0, 1, MAX_BODY_BYTES, MAX_BODY_BYTES + 1, 3 * MAX_BODY_BYTES])
def test_a_long_body_goes_in_several_frames(size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)

    found = FrameReader().feed(body_frames(body[:size]))

    assert b"".join(frame.payload for frame in found) == body[:size]
    assert all(len(frame.payload) <= MAX_BODY_BYTES for frame in found)


@pytest.mark.parametrize(
    "data", [b"\x00\x00\x00\x00\x00", b"GET / HTTP/1.1", b"\x03\xff\xff\xff\xff"]
)
def test_bytes_that_are_no_frames_are_told_at_once(data: bytes) -> None:
    with pytest.raises(BrokenFrame):
        FrameReader().feed(data)
