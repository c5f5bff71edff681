"""Captured steps with prompts, against the same steps launched one by one.

A CPU stands for the device; attention is Triton's backend, which computes with torch there.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remora.configs.planning.device_plan import DevicePlan
from remora.configs.planning.graph_sizes import MAX_PROMPTS
from remora.engine.attention.triton_backend import TritonAttention
from remora.engine.graphs.device_forward import DeviceForward, StepLimits
from remora.engine.graphs.device_stream import stream_of
from remora.engine.graphs.prompt_steps import prompt_shapes
from remora.engine.layers import experts
from remora.engine.models.decoder import DecoderModel
from remora.engine.runner.inputs import InputBatch, dummy_step
from remora.engine.types import RowInit, SamplingParams, StepPlan
from remora.kernels.moe_routing import route
from tests.conftest import TinyCheckpoints
from tests.engine.graphs.device_runs import CPU, Rerun, run
from tests.engine.graphs.test_device_forward import ASKED, make_requests
from tests.engine.loaded import load_f32

PAGE_SIZE, MAX_PAGES, MAX_ROWS = 4, 12, 5
NOTHING = np.empty(0, dtype=np.int32)


def make_pass(model: DecoderModel) -> tuple[DeviceForward, TritonAttention]:
    attention = TritonAttention(
        num_layers=len(model.layers),
        num_pages=MAX_ROWS * MAX_PAGES,
        page_size=PAGE_SIZE,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        dtype=torch.float32,
        device="cpu",
    )
    limits = StepLimits(max_rows=MAX_ROWS, max_tokens=32, max_pages=MAX_PAGES)
    return DeviceForward(model, attention, limits, stream_of(CPU)), attention


class Both:
    """The same steps on two passes: one captured steps with prompts, the other has no graphs.

    Tokens of a step are known to the host only after the next step.
    """

    def __init__(self, path: Path, sizes: tuple[int, ...], decodes: tuple[int, ...] = ()) -> None:
        torch.set_num_threads(1)
        model = load_f32(path)
        self.runner = Rerun()
        self.captured, self.attention = make_pass(model)
        self.captured.capture(self.runner, decodes, prompt_sizes=sizes)
        self.launched, self.expected_attention = make_pass(model)
        self.table = InputBatch(
            max_rows=MAX_ROWS, max_tokens=MAX_PAGES * PAGE_SIZE, page_size=PAGE_SIZE
        )
        self.num_pages = 0
        self.unknown = NOTHING, np.empty(0, dtype=np.int64)

    def start(self, row: int, length: int) -> None:
        """Begin a row with a prompt of `length` tokens and pages for eight more."""
        self.table.start(
            RowInit(
                row=row,
                token_ids=(np.arange(length, dtype=np.int64) * (row + 3) + 10) % 250,
                num_prompt_tokens=length,
                seed=0,
                sampling=SamplingParams(),
            )
        )
        count = (length + 8) // PAGE_SIZE + 1
        pages = np.arange(self.num_pages, self.num_pages + count, dtype=np.int32) + 1
        self.num_pages += count
        self.table.add_pages(np.full(count, row, dtype=np.int32), pages)

    def step(self, *rows: tuple[int, int, int], samples: tuple[bool, ...] | None = None) -> None:
        """Run a step of rows (row, first token, number of tokens); compare logits and KV."""
        places, starts, counts = np.array(rows, dtype=np.int32).T
        has_token = np.array(samples or [True] * len(rows))
        inputs = self.table.inputs(
            StepPlan(
                step_id=0,
                added=(),
                dropped=NOTHING,
                page_rows=NOTHING,
                page_ids=NOTHING,
                rows=places,
                starts=starts,
                num_tokens=counts,
                samples=has_token,
            )
        )
        self.table.add_tokens(*self.unknown)

        logits, expected = self.captured.forward(inputs), self.launched.forward(inputs)

        close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
        close(logits, expected)
        for ours, theirs in zip(
            self.attention.kv_pages, self.expected_attention.kv_pages, strict=True
        ):
            close(ours[:, 1:], theirs[:, 1:])  # but the dump page
        every = 0, inputs.num_tokens
        close(self.captured.logits(*every), self.launched.logits(*every))
        token_ids = expected.argmax(1)
        self.captured.set_last_tokens(token_ids)
        self.launched.set_last_tokens(token_ids)
        self.unknown = places[has_token], token_ids.numpy()


@pytest.mark.parametrize("sizes", [(32,), (4, 6, 8, 16, 32)])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3-moe", "gpt-oss"])
def test_logits_and_kv_are_those_of_steps_launched_one_by_one(
    family: str, sizes: tuple[int, ...], tiny_checkpoints: TinyCheckpoints
) -> None:
    both = Both(tiny_checkpoints(family), sizes)
    for row, length in enumerate((9, 20, 3, 12, 1)):
        both.start(row, length)

    both.step((0, 0, 9))  # one prompt
    both.step((0, 9, 1), (1, 0, 5), samples=(True, False))  # a chunk beside a row that decodes
    both.step((0, 10, 1), (2, 0, 3), (1, 5, 15))  # several prompts, one of which has begun
    both.step((0, 11, 1), (4, 0, 1), (1, 20, 1), (2, 3, 1), (3, 0, 12))  # every row
    both.start(0, 2)
    both.step((2, 4, 1), (3, 12, 1), (0, 0, 2), samples=(True, True, False))
    assert both.runner.num_replayed == 5


def test_a_row_may_begin_behind_a_cached_prefix(tiny_checkpoints: TinyCheckpoints) -> None:
    both = Both(tiny_checkpoints("llama"), (8,))
    both.start(0, 8)
    both.step((0, 0, 8))
    both.start(1, 20)
    both.table.tables[1, :2] = both.table.tables[0, :2]

    both.step((0, 8, 1), (1, 8, 7), samples=(True, False))

    assert both.runner.num_replayed == 2


def test_steps_without_a_graph_are_launched(tiny_checkpoints: TinyCheckpoints) -> None:
    """Of too many tokens, or of decode rows only."""
    both = Both(tiny_checkpoints("llama"), (4, 8))
    both.start(0, 9)
    both.start(1, 8)

    both.step((0, 0, 9))
    both.step((0, 9, 1))
    assert both.runner.num_replayed == 0

    both.step((0, 10, 1), (1, 0, 7), samples=(True, False))
    assert both.runner.num_replayed == 1


def test_padding_tokens_get_no_experts(
    tiny_checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Both(tiny_checkpoints("qwen3-moe"), (8,), decodes=(4,))
    chosen: list[Tensor] = []

    def watched(*args: Any) -> tuple[Tensor, Tensor]:
        ids, weights = route(*args)
        chosen.append(ids)
        return ids, weights

    monkeypatch.setattr(experts, "route", watched)
    both.start(0, 5)
    for first, num_tokens, padded in ((0, 5, 8), (5, 1, 4)):
        chosen.clear()
        both.step((0, first, num_tokens))

        captured = [ids for ids in chosen if len(ids) == padded]
        assert len(captured) * 2 == len(chosen)  # the other half was launched
        for ids in captured:
            assert (ids[:num_tokens] >= 0).all()
            assert (ids[num_tokens:] == -1).all()


@pytest.mark.parametrize("max_rows", [1, 2, 7, 300])
@pytest.mark.parametrize("max_pages", [1, 3, 1000])
def test_every_token_and_row_has_a_place(max_rows: int, max_pages: int) -> None:
    shapes = prompt_shapes(
        (2, 16, 24, 200), max_rows=max_rows, max_pages=max_pages, num_slots=2, windowed=False
    )
    smallest = 2
    for shape in shapes:
        for num_tokens in range(smallest, shape.num_tokens + 1):
            for num_rows in {1, min(max_rows, num_tokens - 1)}:
                step = dummy_step(num_tokens, num_rows, max_pages)
                if not shape.holds(step):
                    assert num_rows - step.num_decodes > MAX_PROMPTS
                    continue
                arrays = shape.arrays(step, step.grown, step.rows, line=max_rows, adapted=False)
                sizes = [each.dims[0] for each in shape.shapes(False)]
                assert all(
                    len(values) <= size for (values, _), size in zip(arrays, sizes, strict=True)
                )
                lengths, (starts, end) = arrays[4][0], arrays[5]
                assert len(starts) <= shape.num_rows + 1
                counts = np.diff(starts[shape.max_decodes :], append=end)
                assert counts.min() >= 0
                own = lengths[shape.max_decodes :]
                assert starts[shape.max_decodes] == step.num_decodes
                assert (counts[: len(own)] <= own).all()
                assert (own[num_rows - step.num_decodes :] <= max_pages).all()
                assert lengths[: shape.max_decodes].sum() == step.num_decodes
        smallest = shape.num_tokens + 1


CAPTURED = DevicePlan(graph_sizes=(1, 2, 4), graph_prompt_sizes=(2, 4, 8, 16))


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("name", ["drawn", "penalised", "scored", "shown", "mixed"])
def test_an_engine_launches_no_step_by_itself(
    name: str,
    overlap: bool,
    tiny_checkpoints: TinyCheckpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tiny_checkpoints("llama")
    expected = run(path, ASKED[name], forward="eager")
    monkeypatch.delattr(DeviceForward, "_launch")

    got = run(
        path,
        ASKED[name],
        graph_runner=Rerun(),
        overlap=overlap,
        make_attention=TritonAttention,
        how=CAPTURED,
    )

    assert got.token_ids() == expected.token_ids()
    for key, values in expected.logprobs().items():
        assert got.logprobs()[key] == pytest.approx(values, abs=1e-4)


def test_rows_that_are_preempted_give_the_same_tokens(tiny_checkpoints: TinyCheckpoints) -> None:
    requests = make_requests(max_tokens=24, temperature=0.9, seed=11, ignore_eos=False)
    path = tiny_checkpoints("llama")
    got = run(
        path,
        requests,
        graph_runner=Rerun(),
        overlap=True,
        make_attention=TritonAttention,
        how=CAPTURED,
        num_pages=20,
        conservativeness=0.1,
        max_model_len=80,
    )

    assert got.num_preemptions > 0
    assert got.token_ids() == run(path, requests, forward="eager").token_ids()
