"""Arrays come to the device whole, in the same place, and untouched by the uploads after."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remora.engine.graphs.device_stream import HostStream, Readback
from remora.engine.graphs.staging import Shape, Staging, room_for

CPU = HostStream(torch.device("cpu"))
DTYPES = st.sampled_from([np.int64, np.int32, np.float64, np.float32])
ARRAYS = st.lists(st.tuples(DTYPES, st.lists(st.integers(0, 5), max_size=2)), max_size=6)


@given(wanted=ARRAYS)
def test_what_is_uploaded_arrives_where_views_of_its_shapes_are(
    wanted: list[tuple[type, list[int]]],
) -> None:
    numbers = np.random.default_rng(0)
    arrays: list[npt.NDArray[Any]] = [
        (numbers.random(dims) * 100).astype(dtype) for dtype, dims in wanted
    ]
    shapes = [Shape.of(array) for array in arrays]
    staging = Staging(CPU, room_for(shapes))
    before = staging.views(shapes)

    made = staging.upload(arrays)

    for array, there, view in zip(arrays, made, before, strict=True):
        assert np.array_equal(there.numpy(), array)
        assert there.data_ptr() == view.data_ptr()
        assert there.numpy().dtype == array.dtype


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes do not fit into a buffer of 16"):
        Staging(CPU, 16).upload([np.zeros(1, np.int32), np.zeros(1, np.int64)])


def test_the_host_may_be_ahead_by_a_step() -> None:
    """A buffer that may still be read is not written by the next two uploads."""
    staging = Staging(CPU, 16)
    here = [buffer.numpy() for buffer in staging._pinned]

    staging.upload([np.array([7], np.int64)])
    staging.upload([np.array([8], np.int64)])
    staging.upload([np.array([9], np.int64)])

    assert sorted(int(buffer[:8].view(np.int64)[0]) for buffer in here) == [7, 8, 9]


def test_arrays_ride_with_the_next_upload_only() -> None:
    staging = Staging(CPU, 64)

    staging.ride([np.array([1.5, 2.5])])
    (own,) = staging.upload([np.array([7], np.int32)])
    riders = [each.tolist() for each in staging.arrived()]
    (later,) = staging.upload([np.array([8], np.int32)])

    assert (own.data_ptr(), later.tolist()) == (later.data_ptr(), [8])
    assert riders == [[1.5, 2.5]]
    assert staging.arrived() == []


def test_results_that_are_not_taken_yet_keep_their_buffers() -> None:
    readback = Readback(CPU)

    fetches = [readback.start([torch.tensor([number]), torch.zeros(0)]) for number in range(5)]

    assert [fetch()[0].tolist() for fetch in fetches] == [[number] for number in range(5)]


def test_buffers_of_taken_results_are_used_again() -> None:
    readback = Readback(CPU)
    readback.start([torch.tensor([1.0])])()
    (buffers,) = readback._free.values()

    taken = readback.start([torch.tensor([2.0])])

    assert buffers == []
    assert taken()[0].tolist() == [2.0]
    assert len(buffers) == 1
