"""The arrays of captured decode steps, padded to the sizes of a graph.

Padding rows have length 1, and read and write the dump page; the line of tables that they use is
that of no row. Knows nothing of graphs or models.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from torch import Tensor

from remora.engine.graphs.staging import PaddedArrays, Shape
from remora.engine.graphs.step_sampling import NUM_PARAMS, draw_shapes
from remora.engine.kv.pages import DUMP_PAGE
from remora.engine.runner.inputs import Int32Array, StepInputs
from remora.kernels.row_tiles import cut_tiles, tile_size

DUMP_SLOT = 0  # of the dump page
INT64, INT32 = np.dtype(np.int64), np.dtype(np.int32)


@cache
def decode_shapes(size: int, adapted: bool, windowed: bool) -> list[Shape]:
    """Return the shapes of `decode_arrays` for `size` rows."""
    shapes = [
        *(Shape((size,), INT64) for _ in range(4)),
        Shape((size,), INT32),
        *(Shape((size,), INT64) for _ in range(2)),  # places in tables index without a conversion
        *(Shape((size,), INT32) for _ in range(2)),
        *draw_shapes(size),
        *(Shape((size,), INT64) for _ in range(windowed)),
    ]
    if adapted:
        shapes += [Shape((size,), INT32), Shape((size, 3), INT32)]
    return shapes


def decode_arrays(
    inputs: StepInputs,
    grown: Int32Array,
    params: PaddedArrays,
    *,
    size: int,
    line: int,
    adapted: bool,
) -> PaddedArrays:
    """Return a step's arrays, each with the value of the padding at its end.

    They are token ids, positions, slots, lines of tables and lengths; new entries of page tables,
    in four; draw parameters, in NUM_PARAMS; slots of window layers; with `adapted`, rows and tiles
    of adapters.

    grown:  as in StepInputs
    line:   of the tables, for padding
    """
    arrays: PaddedArrays = [
        (inputs.token_ids, 0),
        (inputs.positions, 0),
        (inputs.slots, DUMP_SLOT),
        (inputs.rows, line),
        (inputs.lengths, 1),
        (grown[0], line),  # padding entries write the dump page to the dump line
        (grown[1], 0),
        (grown[2], DUMP_PAGE),
        (grown[3], DUMP_PAGE),
        *params,
    ]
    if inputs.windows is not None:
        arrays.append((inputs.windows.slots, DUMP_SLOT))
    if adapted:
        arrays += [(each, 0) for each in cut_tiles(inputs.adapters, tile_size(size))]
    return arrays


def split_decode(
    views: list[Tensor], windowed: bool
) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Split uploaded arrays: inputs, new entries, draw parameters, window slots, tiles."""
    first = 9 + NUM_PARAMS
    last = first + windowed
    return views[:5], views[5:9], views[9:first], views[first:last], views[last:]
