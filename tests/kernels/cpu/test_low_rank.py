"""Low-rank updates in native products and embeddings, against `LowRankSlots` in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.cpu.buffers import Rows, Updates
from remora.kernels.cpu.build import InstructionSet
from remora.kernels.cpu.library import Epilogue, Format, Library, Team
from remora.kernels.cpu.packing import PACKED, PackedWeight
from remora.kernels.cpu.program import Program
from remora.kernels.lora import LowRankSlots, RowGroups
from tests.kernels.cpu import products
from tests.kernels.cpu.conftest import load
from tests.kernels.cpu.products import (
    EPS,
    GUARD,
    has_tiles,
    make_batch,
    make_rows,
    pack_alone,
    read_rows,
    unpack,
)

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A product with updates.

    ranks:  of each slot's parts; 0 = none
    rows:   each row's slot, counted from 1; 0 = none
    """

    format: Format = Format.F32
    epilogue: Epilogue = Epilogue.STORE
    inputs: int = 83
    parts: tuple[int, ...] = (64, 30, 41)
    max_rank: int = 9
    ranks: tuple[tuple[int, ...], ...] = ((9, 9, 9), (0, 0, 0), (1, 4, 0))
    rows: tuple[int, ...] = (0, 3, 1, 1, 2, 0, 3, 1, 3, 3, 0, 0, 0, 1, 2, 3, 3, 1)
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def is_gated(self) -> bool:
        return self.epilogue is Epilogue.GATED


@st.composite
def cases(draw: st.DrawFn) -> Case:
    epilogue = draw(st.sampled_from(Epilogue))
    sizes = st.one_of(st.integers(1, 150), st.sampled_from([64, 128]))
    gate = draw(sizes)
    parts = st.lists(sizes, min_size=1, max_size=4).map(tuple)
    max_rank = draw(st.integers(1, 64))
    num_slots = draw(st.integers(1, 5))
    case = Case(
        format=draw(st.sampled_from(PACKED)),
        epilogue=epilogue,
        inputs=draw(st.integers(1, 150)),
        parts=(gate, gate) if epilogue is Epilogue.GATED else draw(parts),
        max_rank=max_rank,
        rows=tuple(draw(st.lists(st.integers(0, num_slots), min_size=1, max_size=70))),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 2**31)),
    )
    rank = st.one_of(st.just(0), st.integers(0, max_rank), st.just(max_rank))
    ranks = st.tuples(*[st.tuples(*[rank] * len(case.parts))] * num_slots)
    return replace(case, ranks=draw(ranks))


def make_gated(format: Format = Format.F32, half: int = 75) -> Case:
    return Case(
        format=format,
        epilogue=Epilogue.GATED,
        parts=(half, half),
        ranks=((9, 9), (0, 0), (1, 4)),
    )


class Drawn:
    """A case's numbers.

    slots, exact:  the same updates, in the case's number format and in float64
    """

    def __init__(self, team: Team, case: Case) -> None:
        generator = torch.Generator().manual_seed(case.seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        n, count = sum(case.parts), len(case.rows)
        self.case = case
        self.slots, self.exact = (make_slots(case, dtype) for dtype in (case.dtype, torch.float64))
        for slot, ranks in enumerate(case.ranks):
            for part, (rank, size) in enumerate(zip(ranks, case.parts, strict=True)):
                if rank > 0:
                    a, b = draw(rank, case.inputs), draw(size, rank)
                    for slots in (self.slots, self.exact):
                        slots.write(slot, part, a.to(case.dtype), b.to(case.dtype))
        weight, bias = draw(n, case.inputs), draw(n)
        self.weight = pack_alone(team, weight, bias, case.format, gated=case.is_gated)
        self.bias = bias
        self.x = draw(count, case.inputs)
        self.rows = make_rows(team, case.format, self.x)
        self.start = draw(count, n) if case.epilogue is Epilogue.ADD else None

    @property
    def floats(self) -> Tensor:
        """What A is multiplied with: rows before they are quantised, if they are."""
        return self.x if self.case.format.is_grouped else self.rows.values

    def pick(self, index: Sequence[int]) -> Drawn:
        """Return the same with some of the rows only."""
        picked = object.__new__(Drawn)
        picked.__dict__ = dict(self.__dict__)
        rows, at = self.rows, list(index)
        picked.case = replace(self.case, rows=tuple(self.case.rows[row] for row in at))
        picked.x = self.x[at]
        picked.start = None if self.start is None else self.start[at]
        picked.rows = Rows(
            format=rows.format,
            values=rows.values[at],
            scales=None if rows.scales is None else rows.scales[at],
            sums=None if rows.sums is None else rows.sums[at],
        )
        return picked


def make_slots(case: Case, dtype: torch.dtype) -> LowRankSlots:
    return LowRankSlots(
        len(case.ranks), case.inputs, case.parts, case.max_rank, dtype=dtype, device="cpu"
    )


def make_updates(slots: LowRankSlots, num_rows: int) -> Updates:
    """With NaN where nothing has been shrunk."""
    return Updates(slots, torch.full((num_rows, slots.a.shape[1] + 3), torch.nan))


def multiply(team: Team, drawn: Drawn, *, updates: bool = True) -> Tensor:
    """Return the product, padding columns included."""
    made = make_updates(drawn.slots, len(drawn.case.rows))
    return products.multiply(
        team,
        drawn.rows,
        drawn.weight,
        epilogue=drawn.case.epilogue,
        start=drawn.start,
        updates=(made, drawn.floats, drawn.case.rows) if updates else None,
    )


def absolute(slots: LowRankSlots, case: Case) -> LowRankSlots:
    made = make_slots(case, torch.float64)
    made.a[:], made.b[:], made.ranks[:] = slots.a.abs(), slots.b.abs(), slots.ranks
    return made


def expect(team: Team, drawn: Drawn) -> tuple[Tensor, Tensor]:
    """Return the product before its epilogue, and how far it can be off: one rounding a term.

    Tiles round x, unless it is bf16, and A x to bf16.
    """
    case = drawn.case
    groups = RowGroups.of(np.array(case.rows, dtype=np.int32), CPU)
    read, unpacked = read_rows(drawn.rows, case.inputs), unpack(team, drawn.weight)
    floats = drawn.floats[:, : case.inputs].double()
    product = read @ unpacked.values.T + drawn.bias.double()
    size = read.abs() @ unpacked.size.T + drawn.bias.abs().double()
    drawn.exact.add(floats, product, groups)
    base = size.clone()
    absolute(drawn.exact, case).add(floats.abs(), size, groups)
    bound = (2 * case.inputs + case.max_rank + 16) * EPS[torch.float32] * size
    if has_tiles(team) and case.dtype is torch.bfloat16:
        bound += 2.1 * EPS[torch.bfloat16] * (size - base)
    return product, bound


def check(team: Team, case: Case) -> None:
    drawn = Drawn(team, case)

    out = multiply(team, drawn)

    products.check_product(out, *expect(team, drawn), case.epilogue, drawn.start)
    without = multiply(team, drawn, updates=False)
    is_base = torch.tensor(case.rows) == 0
    assert torch.equal(out[is_base], without[is_base])


@settings(max_examples=150)
@given(case=cases())
def test_each_row_gets_its_adapters_update_before_the_epilogue(team: Team, case: Case) -> None:
    check(team, case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("epilogue", [Epilogue.STORE, Epilogue.ADD])
def test_every_instruction_set_updates(
    each_team: Team, format: Format, epilogue: Epilogue, dtype: torch.dtype
) -> None:
    check(each_team, Case(format=format, epilogue=epilogue, dtype=dtype))
    check(each_team, Case(format=format, epilogue=epilogue, dtype=dtype, parts=(64, 16, 48)))
    for half in (64, 75):
        check(each_team, replace(make_gated(format, half), dtype=dtype))


@pytest.mark.parametrize("format", PACKED)
@pytest.mark.parametrize("inputs", [64, 83])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbours(
    library: Library, each_team: Team, format: Format, inputs: int, dtype: torch.dtype
) -> None:
    rows = tuple(np.random.default_rng(0).integers(0, 4, 40).tolist()) + (1,) * 50
    single = Team(library, 1)
    for case in (
        Case(format=format, inputs=inputs, rows=rows, parts=(64, 30, 41), dtype=dtype),
        Case(format=format, inputs=inputs, rows=rows, parts=(64, 64, 32), dtype=dtype),
    ):
        drawn = Drawn(each_team, case)
        whole = multiply(each_team, drawn)

        assert torch.equal(multiply(each_team, drawn.pick(range(90)[::-1])).flip(0), whole)
        for index in ([*range(0, 90, 3)], [*range(7, 60)], *([row] for row in range(0, 90, 5))):
            assert torch.equal(multiply(each_team, drawn.pick(index)), whole[index])
        if each_team.library.instructions == library.instructions:
            assert torch.equal(multiply(single, drawn), whole)
    single.close()


@pytest.mark.parametrize("format", [Format.BF16, Format.Q8, Format.Q8_0, Format.Q4])
@pytest.mark.parametrize("max_rank", [9, 70])
def test_tile_registers_update_like_their_emulation(format: Format, max_rank: int) -> None:
    """The first rows are so small that sums of products are flushed to 0."""
    ranks = ((max_rank,) * 2, (0, 0), (1, 4))
    rows = (0, 3, 1, 1, 2, 0, 3, 3) + (1,) * 70 + (3, 1)
    case = Case(
        format=format,
        dtype=torch.bfloat16,
        parts=(64, 75),
        ranks=ranks,
        rows=rows,
        max_rank=max_rank,
    )
    outs = []
    for instructions in (InstructionSet.AMX, InstructionSet.EMULATED):
        team = Team(load(instructions), 2)
        drawn = Drawn(team, case)
        drawn.x[:4] *= 2.0**-128
        drawn.rows = make_rows(team, format, drawn.x)
        outs.append(multiply(team, drawn))
        team.close()

    assert torch.equal(*outs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hundreds_of_rows_of_one_adapter_are_cut_into_blocks(
    team: Team, dtype: torch.dtype
) -> None:
    rows = (0,) * 5 + (1,) * 333 + (3,) * 64
    check(team, Case(rows=rows, dtype=dtype, format=Format.BF16))


def test_what_is_written_to_a_slot_between_runs_counts_at_once(team: Team) -> None:
    drawn = Drawn(team, Case(rows=(1, 2, 0)))
    batch, out = make_batch(3), torch.zeros(3, drawn.weight.out_columns)
    batch.adapters[:] = drawn.case.rows
    program, updates = Program(team, batch), make_updates(drawn.slots, 3)
    program.shrink(drawn.floats, updates)
    program.multiply(drawn.rows, drawn.weight, out, updates=updates)

    results = []
    for step in range(3):
        if step == 1:
            drawn.slots.clear(0)
        if step == 2:
            drawn.slots.write(1, 0, torch.ones(2, 83), torch.ones(64, 2))
        program.run(3, 0, 0)
        results.append(out.clone())

    without = multiply(team, drawn, updates=False)
    first, cleared, written = results
    assert torch.equal(first[1:], without[1:])
    assert not torch.equal(first[0], without[0])
    assert torch.equal(cleared, without)
    assert torch.equal(written[0], without[0])
    torch.testing.assert_close(
        written[1, :64], without[1, :64] + 2 * drawn.x[1].sum(), rtol=1e-4, atol=1e-4
    )
    assert torch.equal(written[1, 64:], without[1, 64:])


@pytest.mark.parametrize("format", PACKED)
def test_rows_of_logits_have_the_adapters_of_their_tokens(team: Team, format: Format) -> None:
    drawn = Drawn(team, Case(format=format, rows=(1, 0, 3, 1)))
    batch, out = make_batch(6), torch.zeros(6, drawn.weight.out_columns)
    floats, slots = torch.zeros(6, drawn.floats.shape[1], dtype=drawn.floats.dtype), drawn.slots
    floats[:4] = drawn.floats
    batch.adapters[:] = 3, 0, 1, 2, 1, 2
    batch.logit_index[:4] = 4, 1, 0, 2
    program, updates = Program(team, batch), make_updates(slots, 6)
    rows = Rows.allocate(team, format, 6, 83)
    if format.is_grouped:
        program.round(floats, 83, rows, on_logits=True)
    else:
        rows.values[:, :83] = floats[:, :83]
    program.shrink(floats, updates, on_logits=True)
    program.multiply(rows, drawn.weight, out, updates=updates, on_logits=True)

    program.run(0, 0, 4)

    assert torch.equal(out[:4], multiply(team, drawn))
    assert not out[4:].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_adapter_spoils_its_own_rows_alone(team: Team, bad: float) -> None:
    drawn = Drawn(team, Case(rows=(1, 0, 3, 3, 1)))
    before = multiply(team, drawn)
    drawn.slots.a[0, 2, 7] = bad
    drawn.slots.b[0, 1, 3, 5] = bad

    out = multiply(team, drawn)

    assert torch.equal(out[1:4], before[1:4])
    assert not out[[0, 4]].isfinite().all(1).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 70, 200])
def test_what_is_looked_up_is_updated(each_team: Team, size: int, dtype: torch.dtype) -> None:
    case = Case(inputs=50, parts=(size,), ranks=((9,), (0,), (4,)), dtype=dtype)
    drawn = Drawn(each_team, case)
    count, rows = len(case.rows), np.array(case.rows, dtype=np.int32)
    ids = torch.randint(0, 50, (count,))
    out = torch.full((count + 1, size + 2), GUARD)
    table, batch = torch.randn(50, size), make_batch(count)
    batch.token_ids[:], batch.adapters[:] = ids.numpy(), rows
    program = Program(each_team, batch)
    program.embed(table, out)
    program.update_embedded(make_updates(drawn.slots, count), out)

    program.run(count, 0, 0)

    expected = table[ids].double()
    drawn.exact.add_looked_up(ids, expected, RowGroups.of(rows, CPU))
    torch.testing.assert_close(out[:count, :size].double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(out[:count, :size][rows == 0], table[ids][rows == 0])
    assert (out[count] == GUARD).all()
    assert (out[:, size:] == GUARD).all()


def test_updates_that_do_not_fit_are_refused(team: Team) -> None:
    drawn = Drawn(team, Case(rows=(1, 2, 3)))
    program, updates = Program(team, make_batch(3)), make_updates(drawn.slots, 3)
    other: PackedWeight = pack_alone(team, torch.randn(60, 83), None, Format.F32)

    with pytest.raises(ValueError, match="columns"):
        Updates(drawn.slots, torch.zeros(3, 26))
    with pytest.raises(ValueError, match="columns"):
        program.shrink(torch.zeros(3, 82), updates)
    with pytest.raises(ValueError, match="rows"):
        program.shrink(torch.zeros(2, 83), updates)
    with pytest.raises(ValueError, match="columns"):
        program.multiply(drawn.rows, other, torch.zeros(3, 64), updates=updates)
    with pytest.raises(ValueError, match="columns"):
        program.update_embedded(updates, torch.zeros(3, 134))
    assert len(program) == 0
