"""Low-rank slots against the dense formula: each row gets its own adapter's update, others none."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.lora import LowRankSlots, RowGroups

INPUTS, PARTS, MAX_RANK, NUM_SLOTS = 24, (8, 3, 5), 6, 4
OUTPUTS = sum(PARTS)
CPU = torch.device("cpu")

# Ranks of each slot's parts; a slot may be empty, and a part may lack an update.
SLOTS = st.lists(
    st.lists(st.integers(0, MAX_RANK), min_size=len(PARTS), max_size=len(PARTS)),
    min_size=NUM_SLOTS,
    max_size=NUM_SLOTS,
)
ROWS = st.lists(st.integers(0, NUM_SLOTS), min_size=0, max_size=20)


def fill(slots: LowRankSlots, ranks: list[list[int]]) -> list[Tensor]:
    """Write random updates; returns what each slot adds to a dense weight [outputs, inputs]."""
    dense = []
    for slot, of_parts in enumerate(ranks):
        whole = torch.zeros(slots.bounds[-1], slots.a.shape[2])
        for part, rank in enumerate(of_parts):
            start, stop = slots.bounds[part], slots.bounds[part + 1]
            a, b = torch.randn(rank, slots.a.shape[2]), torch.randn(stop - start, rank)
            if rank > 0:
                slots.write(slot, part, a, b)
            whole[start:stop] = b @ a
        dense.append(whole)
    return dense


def make_slots(inputs: int = INPUTS, parts: tuple[int, ...] = PARTS) -> LowRankSlots:
    return LowRankSlots(NUM_SLOTS, inputs, parts, MAX_RANK, dtype=torch.float32, device="cpu")


@given(ranks=SLOTS, rows=ROWS, seed=st.integers(0, 9))
def test_each_row_gets_its_adapters_update_and_rows_of_none_stay_the_same_bits(
    ranks: list[list[int]], rows: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    slots = make_slots()
    dense = fill(slots, ranks)
    x, y = torch.randn(len(rows), INPUTS), torch.randn(len(rows), OUTPUTS)
    before = y.clone()

    slots.add(x, y, RowGroups.of(np.array(rows, dtype=np.int32), CPU))

    for row, slot in enumerate(rows):
        if slot == 0:
            assert torch.equal(y[row], before[row])
        else:
            expected = before[row] + dense[slot - 1] @ x[row]
            torch.testing.assert_close(y[row], expected, atol=1e-4, rtol=1e-4)


@given(rank=st.integers(0, MAX_RANK), rows=ROWS)
def test_what_is_looked_up_is_updated_as_if_it_had_been_multiplied(
    rank: int, rows: list[int]
) -> None:
    torch.manual_seed(1)
    slots = make_slots(inputs=11, parts=(7,))
    fill(slots, [[rank]] * NUM_SLOTS)
    ids = torch.randint(0, 11, (len(rows),))
    groups = RowGroups.of(np.array(rows, dtype=np.int32), CPU)
    multiplied, looked_up = torch.zeros(len(rows), 7), torch.zeros(len(rows), 7)

    slots.add(torch.nn.functional.one_hot(ids, 11).float(), multiplied, groups)
    slots.add_looked_up(ids, looked_up, groups)

    torch.testing.assert_close(looked_up, multiplied)


def test_a_slot_that_is_cleared_holds_nothing_of_the_one_before() -> None:
    torch.manual_seed(2)
    slots = make_slots()
    fill(slots, [[6, 6, 6]] * NUM_SLOTS)
    groups = RowGroups.of(np.array([2], dtype=np.int32), CPU)
    x = torch.randn(1, INPUTS)

    slots.clear(1)
    emptied = torch.zeros(1, OUTPUTS)
    slots.add(x, emptied, groups)
    a, b = torch.randn(2, INPUTS), torch.randn(PARTS[0], 2)
    slots.write(1, 0, a, b)
    anew = torch.zeros(1, OUTPUTS)
    slots.add(x, anew, groups)

    assert not emptied.any()
    torch.testing.assert_close(anew[0, : PARTS[0]], (b @ (a @ x[0])))
    assert not anew[0, PARTS[0] :].any()
