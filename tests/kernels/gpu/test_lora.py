"""Kernels of low-rank updates against the torch code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.lora import LowRankSlots, RowGroups
from remora.kernels.row_tiles import RowTiles
from tests.kernels.gpu.devices import interpreted_only, on_gpu

ROOT = Path(__file__).parents[3]
# Of sums of about one; A x and the result are rounded to the format.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def make_slots(
    ranks: list[list[int]],
    *,
    inputs: int,
    parts: list[int],
    max_rank: int,
    device: str,
    dtype: torch.dtype = torch.float32,
) -> LowRankSlots:
    """Fill slots with random updates, a rank for each part; what no adapter uses is NaN."""
    slots = LowRankSlots(len(ranks), inputs, parts, max_rank, dtype=dtype, device=device)
    for slot, of_parts in enumerate(ranks):
        for part, rank in enumerate(of_parts):
            if rank > 0:
                a = torch.randn(rank, inputs) / inputs**0.5
                b = torch.randn(parts[part], rank) / rank**0.5
                slots.write(slot, part, a.to(device, dtype), b.to(device, dtype))
    for slot, rank in enumerate(slots.ranks.tolist()):
        slots.a[slot].view(len(parts), max_rank, inputs)[:, rank:] = float("nan")
        slots.b[slot, :, rank:] = float("nan")
    return slots


def exact(slots: LowRankSlots) -> LowRankSlots:
    """Return the same updates in float64, for the torch code."""
    parts = np.diff(slots.bounds).tolist()
    made = LowRankSlots(
        len(slots.ranks),
        slots.a.shape[2],
        parts,
        slots.max_rank,
        dtype=torch.float64,
        device="cpu",
    )
    made.a[:], made.b[:], made.ranks[:] = slots.a.cpu(), slots.b.cpu(), slots.ranks
    return made


def tiled(rows: list[int], device: str) -> RowGroups:
    return RowGroups(tiles=RowTiles.of(np.array(rows, dtype=np.int32), torch.device(device)))


def grouped(rows: list[int]) -> RowGroups:
    """Group rows for the torch code."""
    groups = sorted(set(rows) - {0})
    return RowGroups(
        tuple((slot - 1, torch.tensor(rows).eq(slot).nonzero().squeeze(1)) for slot in groups)
    )


def check(slots: LowRankSlots, rows: list[int], *, groups: RowGroups | None = None) -> None:
    """Add updates to random rows; compare with the torch code, and rows of no update by bits."""
    dtype, device = slots.a.dtype, str(slots.a.device)
    x = torch.randn(len(rows), slots.a.shape[2], device=device).to(dtype)
    y = torch.randn(len(rows), slots.bounds[-1], device=device).to(dtype)
    before, expected = y.clone(), y.double().cpu()

    slots.add(x, y, groups or tiled(rows, device))
    exact(slots).add(x.double().cpu(), expected, grouped(rows))

    compare(y, expected, before, slots, rows)


def compare(
    y: Tensor, expected: Tensor, before: Tensor, slots: LowRankSlots, rows: list[int]
) -> None:
    tolerance = TOLERANCES[y.dtype]
    torch.testing.assert_close(y.double().cpu(), expected, atol=tolerance, rtol=tolerance)
    still = [row for row, slot in enumerate(rows) if slot == 0 or slots.ranks[slot - 1] == 0]
    assert torch.equal(y[still], before[still])


@st.composite
def cases(draw: st.DrawFn) -> tuple[LowRankSlots, list[int]]:
    """Draw slots, which may be empty, of parts, which may lack an update, and rows."""
    parts = draw(st.lists(st.integers(1, 150), min_size=1, max_size=3))
    max_rank = draw(st.integers(1, 20))
    of_parts = st.lists(st.integers(0, max_rank), min_size=len(parts), max_size=len(parts))
    ranks = draw(st.lists(of_parts, min_size=1, max_size=4))
    rows = draw(st.lists(st.integers(0, len(ranks)), max_size=24))
    torch.manual_seed(draw(st.integers(0, 9)))
    slots = make_slots(
        ranks,
        inputs=draw(st.integers(1, 140)),
        parts=parts,
        max_rank=max_rank,
        dtype=draw(st.sampled_from(list(TOLERANCES))),
        device="cpu",
    )
    return slots, rows


@interpreted_only
@settings(max_examples=25)
@given(case=cases())
def test_rows_get_the_update_of_torch_and_others_keep_their_bits(
    case: tuple[LowRankSlots, list[int]],
) -> None:
    check(*case)


@interpreted_only
@settings(max_examples=12)
@given(case=cases())
def test_looked_up_rows_get_the_update_of_torch(case: tuple[LowRankSlots, list[int]]) -> None:
    slots, rows = case
    ids = torch.randint(0, slots.a.shape[2], (len(rows),))
    y = torch.randn(len(rows), slots.bounds[-1]).to(slots.a.dtype)
    before, expected = y.clone(), y.double()

    slots.add_looked_up(ids, y, tiled(rows, "cpu"))
    exact(slots).add_looked_up(ids, expected, grouped(rows))

    compare(y, expected, before, slots, rows)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 9, 150])
def test_tiles_of_every_size_agree_with_torch(
    device: str, dtype: torch.dtype, num_rows: int
) -> None:
    torch.manual_seed(num_rows)
    slots = make_slots(
        [[5, 5, 5], [0, 0, 0], [16, 1, 0], [3, 0, 0]],
        inputs=100,
        parts=[64, 24, 72],
        max_rank=16,
        dtype=dtype,
        device=device,
    )

    check(slots, torch.randint(0, 5, (num_rows,)).tolist())


@pytest.mark.parametrize(
    ("inputs", "parts", "ranks", "rows"),
    [
        *((inputs, [40], [[8], [4]], [1, 0, 2]) for inputs in (576, 1100, 5000)),  # in splits
        (33, [10, 130], [[100, 70], [2, 1]], [1, 2, 0, 1]),  # ranks in several blocks
    ],
)
def test_long_inputs_and_large_ranks_agree_with_torch(
    device: str, inputs: int, parts: list[int], ranks: list[list[int]], rows: list[int]
) -> None:
    torch.manual_seed(inputs)
    slots = make_slots(ranks, inputs=inputs, parts=parts, max_rank=ranks[0][0], device=device)

    check(slots, rows)


def test_rows_may_be_parts_of_wider_ones(device: str) -> None:
    torch.manual_seed(0)
    slots = make_slots([[3]], inputs=20, parts=[30], max_rank=4, device=device)
    x, y = torch.randn(3, 50, device=device)[:, 7:27], torch.randn(3, 90, device=device)
    before, rows = y.clone(), [1, 0, 1]
    expected = y[:, 40:70].double().cpu()

    slots.add(x, y[:, 40:70], tiled(rows, device))
    exact(slots).add(x.double().cpu(), expected, grouped(rows))

    compare(y[:, 40:70], expected, before[:, 40:70], slots, rows)
    assert torch.equal(y[:, :40], before[:, :40])
    assert torch.equal(y[:, 70:], before[:, 70:])


@pytest.mark.parametrize("rows", [[], [0], [0, 0, 0]])
def test_a_step_without_adapters_changes_nothing(device: str, rows: list[int]) -> None:
    slots = make_slots([[2]], inputs=8, parts=[8], max_rank=2, device=device)

    check(slots, rows)


def test_tiles_without_rows_are_passed_over(device: str) -> None:
    """So that a captured graph may have as many tiles as a step needs at most."""
    torch.manual_seed(0)
    slots = make_slots([[4], [2]], inputs=16, parts=[70], max_rank=4, device=device)
    rows = [2, 0, 1, 1]
    made = RowTiles.of(np.array(rows, dtype=np.int32), torch.device(device))
    more = RowTiles(
        rows=torch.nn.functional.pad(made.rows, (0, 5)),
        tiles=torch.nn.functional.pad(made.tiles, (0, 0, 0, 7)),
        size=made.size,
    )

    check(slots, rows, groups=RowGroups(tiles=more))


def test_a_slot_that_is_cleared_or_written_anew_is_known_to_the_kernels(device: str) -> None:
    torch.manual_seed(0)
    slots = make_slots([[4], [4]], inputs=16, parts=[20], max_rank=4, device=device)

    slots.clear(0)
    check(slots, [1, 2])
    slots.write(0, 0, torch.randn(3, 16, device=device), torch.randn(20, 3, device=device))
    check(slots, [1, 2])


@on_gpu
def test_a_captured_step_runs_again_with_other_rows() -> None:
    torch.manual_seed(0)
    slots = make_slots([[8], [3]], inputs=600, parts=[100], max_rank=8, device="cuda")
    first, second = (
        RowGroups.of(np.array(rows, dtype=np.int32), torch.device("cuda"))
        for rows in ([1, 0, 2], [2, 1, 0])
    )
    x, y = torch.randn(3, 600, device="cuda"), torch.zeros(3, 100, device="cuda")
    expected = torch.zeros(3, 100, dtype=torch.float64)
    slots.add(x, y, first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slots.add(x, y, first)
    assert first.tiles is not None
    assert second.tiles is not None

    first.tiles.rows.copy_(second.tiles.rows)
    first.tiles.tiles.copy_(second.tiles.tiles)
    y.zero_()
    graph.replay()
    exact(slots).add(x.double().cpu(), expected, grouped([2, 1, 0]))

    torch.testing.assert_close(y.double().cpu(), expected, atol=1e-4, rtol=1e-4)


def test_slots_need_no_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import remora.kernels.lora
assert "remora.kernels.gpu.lora" not in sys.modules
"""

    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
