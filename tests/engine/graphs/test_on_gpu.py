"""Whole engines on a GPU: recorded, overlapping, on triton's kernels, against torch on the CPU.

TRITON_INTERPRET=0 python -m pytest -m gpu tests/engine/graphs
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from remora.configs.load import parse_args
from remora.engine.attention.triton_backend import TritonAttention
from remora.engine.graphs.cuda_graphs import CudaGraphRunner
from remora.engine.launch import build_engine
from remora.engine.runner.device_memory import CudaMeter
from remora.engine.types import Request, SamplingParams
from remora.kernels.linear import linear_to_float32
from remora.kernels.memory import to_device
from tests.conftest import TinyCheckpoints
from tests.engine.graphs.device_runs import run
from tests.engine.graphs.test_device_forward import ASKED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
@pytest.mark.parametrize("name", ["greedy", "penalised", "restricted", "scored", "mixed"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_outputs_are_those_of_a_cpu(
    family: str, name: str, recorded: bool, overlap: bool, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints(family)

    expected = run(path, ASKED[name], forward="eager")
    got = run(
        path,
        ASKED[name],
        device=torch.device("cuda"),
        make_attention=TritonAttention,
        graph_runner=CudaGraphRunner() if recorded else None,
        overlap=overlap,
    )

    assert got.token_ids() == expected.token_ids()
    for key, values in expected.logprobs().items():
        assert got.logprobs()[key] == pytest.approx(values, abs=1e-3)


@contextmanager
def no_waiting() -> Iterator[None]:
    """Let operations fail that wait for the device; events may be waited for."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["greedy", "drawn", "penalised", "bad words", "mixed"])
def test_steps_do_not_wait_for_the_device(name: str, tiny_checkpoints: TinyCheckpoints) -> None:
    got = run(
        tiny_checkpoints("llama"),
        ASKED[name],
        device=torch.device("cuda"),
        make_attention=TritonAttention,
        graph_runner=CudaGraphRunner(),
        overlap=True,
        amid=no_waiting(),
    )

    assert all(got.token_ids().values())


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
def test_drafts_stay_on_the_device(recorded: bool, tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints("llama")
    expected = run(path, ASKED["greedy"], forward="eager")

    got = run(
        path,
        ASKED["greedy"],
        device=torch.device("cuda"),
        make_attention=TritonAttention,
        graph_runner=CudaGraphRunner() if recorded else None,
        draft=path,
        amid=no_waiting(),
    )

    assert got.token_ids() == expected.token_ids()
    assert got.num_right == got.num_drafts > 30


def test_arrays_are_brought_without_waiting() -> None:
    numbers = np.arange(1000)
    to_device(numbers, torch.device("cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(2**30)  # type: ignore[no-untyped-call]  # cycles, half a second

    there = to_device(numbers, torch.device("cuda"))
    is_device_busy = not torch.cuda.current_stream().query()
    numbers[:] = 0

    assert is_device_busy
    assert there.tolist() == list(range(1000))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_float32_sums_are_not_rounded(dtype: torch.dtype, bias: bool, rows: int) -> None:
    """Float32 sums of 4096 products of about one."""
    torch.manual_seed(rows)
    x = torch.randn(rows, 4096, device="cuda").to(dtype)
    weight = torch.randn(1000, 4096, device="cuda").to(dtype)
    offset = torch.randn(1000, device="cuda").to(dtype) if bias else None

    product = linear_to_float32(x, weight, offset)

    exact = x.double() @ weight.double().T
    if offset is not None:
        exact += offset.double()
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), exact, atol=2e-3, rtol=0)


def test_an_engine_starts_as_a_user_starts_it(tiny_checkpoints: TinyCheckpoints) -> None:
    """Memory is measured, steps are recorded, and what is left becomes KV."""
    path: Path = tiny_checkpoints("llama")
    free_before = CudaMeter().free_bytes()
    config = parse_args(
        {"model": {"path": str(path)}, "engine": {"device": "cuda", "mem_fraction": 0.2}}
    )

    built = build_engine(config, show_progress=False)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    built.engine.add(Request(request_id="a", prompt_ids=[11, 12, 13], sampling=params))
    tokens: list[int] = []
    while built.engine.has_work:
        tokens += [token for output in built.engine.step() for token in output.token_ids]
    built.engine.close()

    assert built.plan.on_device.overlap
    assert built.plan.on_device.graph_sizes[-1] == built.plan.max_running_requests
    assert 0 < built.plan.kv_bytes < free_before
    assert len(tokens) == 20
