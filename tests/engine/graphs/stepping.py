"""A whole model step by step, as a step program or in torch: rows of random tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remora.configs.planning.rounding import ROUNDINGS, TILE_GROUP
from remora.engine.graphs.step_builder import StepProgramBuilder, StepShape
from remora.engine.graphs.step_weights import WeightFormats
from remora.engine.layers.experts import Experts
from remora.engine.models.decoder import DecoderModel
from remora.engine.protocols import ForwardPass
from remora.engine.runner.device import make_attention
from remora.engine.runner.eager import EagerForward
from remora.engine.runner.forward import native_formats
from remora.engine.runner.inputs import InputBatch
from remora.engine.types import RowInit, SamplingParams, StepPlan
from remora.kernels.cpu.library import Format, Library, Team
from tests.engine.fakes import make_plan
from tests.engine.loaded import load
from tests.kernels.cpu.products import pack_alone, unpack

PAGE_SIZE, MAX_TOKENS, MAX_ROWS, NUM_PAGES = 16, 256, 4, 64
SHAPE = StepShape(
    max_tokens=MAX_TOKENS,
    max_rows=MAX_ROWS,
    num_pages=NUM_PAGES,
    page_size=PAGE_SIZE,
    max_positions=MAX_TOKENS,
)
QUANTIZED_FORMATS = {
    name: native_formats(rounding, Format.BF16, num_layers=0)
    for name, rounding in ROUNDINGS.items()
}
# By `model.quantization`, bfloat16 otherwise; and other number formats.
MODES = {
    "none": WeightFormats(layers=Format.BF16, head=Format.BF16),
    **QUANTIZED_FORMATS,
    "int8 in groups of 64": native_formats(
        replace(ROUNDINGS["int8"], int8_group=TILE_GROUP), Format.BF16, num_layers=0
    ),
    "float32": WeightFormats(layers=Format.F32, head=Format.F32),
    "float16": WeightFormats(layers=Format.F16, head=Format.F16),
    "float16 in int8": QUANTIZED_FORMATS["int8"],
}
DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "float16 in int8": torch.float16,
}
NO_ADAPTERS: Mapping[int, int] = MappingProxyType({})


class Stepper:
    """A forward pass and rows of random tokens on it."""

    def __init__(
        self, forward: ForwardPass, table: InputBatch, adapters: Mapping[int, int] = NO_ADAPTERS
    ) -> None:
        """See `make_native` and `make_eager`.

        adapters:  each row's slot; those not named have none
        """
        self.forward = forward
        self._adapters = adapters
        self._table = table
        self._done: dict[int, int] = {}
        self._pages = iter(np.random.default_rng(0).permutation(NUM_PAGES) + 1)

    def step(self, counts: dict[int, int]) -> Tensor:
        """Compute so many tokens more of each row; return their last logits."""
        rows = sorted(counts, key=lambda row: counts[row] > 1)
        added = tuple(self._start(row) for row in rows if row not in self._done)
        pages = [
            (row, next(self._pages)) for row in rows for _ in range(self._lacking(row, counts))
        ]
        for init in added:
            self._table.start(init)
        page_rows, page_ids = np.array(pages, dtype=np.int32).reshape(-1, 2).T
        self._table.add_pages(page_rows, page_ids)
        inputs = self._table.inputs(
            StepPlan(
                step_id=0,
                added=added,
                dropped=np.empty(0, np.int32),
                page_rows=page_rows,
                page_ids=page_ids,
                rows=np.array(rows, np.int32),
                starts=np.array([self._done[row] for row in rows], np.int32),
                num_tokens=np.array([counts[row] for row in rows], np.int32),
                samples=np.ones(len(rows), np.bool_),
            )
        )
        logits = self.forward.forward(inputs)
        for row in rows:
            self._done[row] += counts[row]
        return logits.clone()

    def _lacking(self, row: int, counts: dict[int, int]) -> int:
        done = self._done[row]
        return -(-(done + counts[row]) // PAGE_SIZE) - -(-done // PAGE_SIZE)

    def _start(self, row: int) -> RowInit:
        self._done[row] = 0
        tokens = np.random.default_rng(row).integers(10, 250, 200)
        return RowInit(
            row=row,
            token_ids=tokens,
            num_prompt_tokens=200,
            seed=0,
            sampling=SamplingParams(),
            adapter_slot=self._adapters.get(row, 0),
        )


def make_table() -> InputBatch:
    return InputBatch(max_rows=MAX_ROWS, max_tokens=MAX_TOKENS, page_size=PAGE_SIZE)


def as_it_is(model: DecoderModel) -> None:
    """Change nothing."""


def make_native(
    path: Path,
    library: Library,
    mode: str = "none",
    *,
    prepare: Callable[[DecoderModel], None] = as_it_is,
    adapters: Mapping[int, int] = NO_ADAPTERS,
) -> Stepper:
    """Return a step program.

    prepare:   what is done with the model before
    """
    model = load(path, DTYPES.get(mode, torch.bfloat16))
    prepare(model)
    table = make_table()
    program = StepProgramBuilder(model, Team(library, 2), SHAPE, table, MODES[mode]).build()
    return Stepper(program, table, adapters)


def make_eager(
    path: Path,
    library: Library,
    mode: str,
    *,
    prepare: Callable[[DecoderModel], None] = as_it_is,
    adapters: Mapping[int, int] = NO_ADAPTERS,
) -> Stepper:
    """Run in float32, in torch, with the weights that the mode's rounding leaves."""
    model = load(path)
    formats = MODES[mode]
    team = Team(library, 1)
    rounded = partial(round_weight, team, DTYPES.get(mode, torch.bfloat16))
    for block in model.blocks:
        for _, linear in block.linears(""):
            sizes = [len(outputs.held) for outputs in linear.parts.values()]
            of_parts = zip(torch.split(linear.weight, sizes), linear.parts, strict=True)
            linear.weight = torch.cat([rounded(part, formats.of(name)) for part, name in of_parts])
        if isinstance(block.mlp, Experts):
            for weights, part in ((block.mlp.gate_up, "gate_proj"), (block.mlp.down, "down_proj")):
                for weight in weights:
                    weight.copy_(rounded(weight, formats.of(part)))
    model.head.linear.weight = rounded(model.head.linear.weight, formats.head)
    team.close()
    prepare(model)
    plan = make_plan(page_size=PAGE_SIZE)
    attention = make_attention(model, plan, NUM_PAGES)
    forward = EagerForward(model, attention, page_size=PAGE_SIZE)
    return Stepper(forward, make_table(), adapters)


def check_close(
    path: Path,
    library: Library,
    mode: str,
    steps: Sequence[dict[int, int]],
    limit: float,
    *,
    hidden: bool = False,
    **options: Any,
) -> None:
    """Compare a step program's logits with those of torch.

    limit:    of the norm of the difference, as a share of the norm
    hidden:   whether hidden states of the last step are compared, too
    options:  of `make_native` and `make_eager`
    """
    native = make_native(path, library, mode, **options)
    exact = make_eager(path, library, mode, **options)
    for counts in steps:
        expected = exact.step(counts)
        assert (native.step(counts) - expected).norm() < limit * expected.norm()
    if hidden:
        expected = exact.forward.hidden(0, 2)
        assert (native.forward.hidden(0, 2) - expected).norm() < limit * expected.norm()
    native.forward.close()


def check_same_bits(make: Callable[[], Stepper]) -> None:
    """Check that a row's logits are the same bits whole, in chunks and among other rows."""
    whole, cut = make(), make()
    expected = whole.step({0: 60})
    assert expected.isfinite().all()

    for counts in ({0: 33, 1: 17}, {2: 1, 0: 1, 1: 5}):
        cut.step(counts)

    assert torch.equal(cut.step({1: 1, 0: 26})[1:], expected)
    assert torch.equal(cut.step({3: 20, 0: 1, 2: 1})[:1], whole.step({0: 1}))
    for stepper in (whole, cut):
        stepper.forward.close()


def round_weight(team: Team, dtype: torch.dtype, weight: Tensor, format: Format) -> Tensor:
    if format is Format.F32:
        return weight
    return unpack(team, pack_alone(team, weight.to(dtype), None, format)).values.float()
