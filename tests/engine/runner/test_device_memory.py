"""What steps need of a device's memory, and what is left of it for KV."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.planning.device_plan import DevicePlan
from remora.configs.planning.plan import EnginePlan, refit
from remora.engine.graphs.device_sampler import DeviceTokenSampler
from remora.engine.graphs.device_stream import HostStream
from remora.engine.models.facts import read_model_facts
from remora.engine.runner.device import make_forward, measure, warm_up, warm_up_sampling
from remora.engine.runner.device_memory import (
    LOGIT_BYTES,
    TRIAL_GRAPHS,
    CudaMeter,
    largest_step,
)
from remora.engine.runner.inputs import StepInputs
from remora.kernels import sampling
from tests.conftest import TinyCheckpoints
from tests.engine.fakes import make_plan
from tests.engine.graphs.device_runs import Rerun
from tests.engine.loaded import load_f32

GIB = 2**30


class FakeMeter:
    """Tells a device's memory in turn, and counts what ran.

    driver:  bytes of trial graphs
    """

    def __init__(self, *peaks: int, driver: int = 0) -> None:
        self.peaks = list(peaks)
        self.driver = driver
        self.num_run = 0

    def peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        self.num_run += 1
        return self.peaks.pop(0)

    def free_bytes(self) -> int:
        return 0

    def driver_bytes(self, run: Callable[[], object]) -> int:
        run()
        return self.driver


class Closing(Rerun):
    """Notes how many graphs it has when it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.captured_and_closed: list[int] = []

    def close(self) -> None:
        self.captured_and_closed.append(self.num_captured)


@pytest.fixture(scope="module")
def llama(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints("llama")


@given(
    max_rows=st.integers(1, 9),
    num_tokens=st.integers(1, 60),
    num_pages=st.integers(2, 12),
)
def test_the_largest_step_is_within_the_plan(
    max_rows: int, num_tokens: int, num_pages: int
) -> None:
    plan = make_plan(max_running_requests=max_rows, num_pages=num_pages)

    step = largest_step(plan, num_tokens)

    counts = np.diff(step.starts)
    assert len(step.rows) == min(max_rows, num_tokens)
    assert counts.max() <= plan.max_sequence_tokens
    if num_tokens <= max_rows * plan.max_sequence_tokens:
        assert counts.max() - counts.min() <= 1
        assert step.num_tokens == num_tokens
    assert list(counts) == sorted(counts)
    assert step.num_decodes == int((counts == 1).sum())
    assert step.positions.max() < plan.max_sequence_tokens
    assert not step.tables.any()


def test_the_largest_steps_and_their_graphs_are_measured(llama: Path) -> None:
    model = load_f32(llama)
    launched = make_plan()
    recorded = replace(launched, on_device=DevicePlan(graph_sizes=(1, 2, 4)))

    def needed(plan: EnginePlan, *peaks: int, driver: int = 0) -> int:
        runner = Closing()
        meter = FakeMeter(*peaks, driver=driver)
        result = measure(model, plan, meter, lambda: runner)
        assert runner.captured_and_closed == ([1 + TRIAL_GRAPHS] if driver else [])
        return result

    assert needed(launched, 100) == 100
    logits = 4 * LOGIT_BYTES * model.vocab_size
    assert needed(recorded, 100, 30, driver=TRIAL_GRAPHS * 7) == 130 + 3 * 7 + logits
    how = DevicePlan(graph_sizes=(1, 2, 4), graph_prompt_sizes=(8, 16))
    both = replace(launched, on_device=how)
    assert needed(both, 100, 30, 50, driver=TRIAL_GRAPHS * 7 - 1) == 150 + 5 * 7 + logits


def test_what_the_driver_takes_is_not_what_torch_reserves(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"torch": 10, "driver": 5}
    cuda: dict[str, Callable[[], object]] = {
        "synchronize": lambda: None,
        "mem_get_info": lambda: (100 - sum(taken.values()), 100),
        "memory_reserved": lambda: taken["torch"],
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)

    assert CudaMeter().driver_bytes(lambda: taken.update(torch=30, driver=12)) == 7
    assert CudaMeter().driver_bytes(lambda: taken.update(torch=20, driver=11)) == 0


def test_steps_of_few_and_of_many_rows_are_warmed_up(llama: Path) -> None:
    model = load_f32(llama)
    plan = make_plan(max_running_requests=6)
    seen: list[tuple[int, int]] = []

    class Forward:
        def forward(self, inputs: StepInputs) -> None:
            seen.append((len(inputs.rows), inputs.num_tokens))

    warm_up(Forward(), plan)  # type: ignore[arg-type]
    warm_up(make_forward(model, plan, 1), plan)

    extending = [(1, 2), (2, 4), (3, 6), (4, 8), (6, 12)]
    assert seen == [*extending, *((min(6, count), count) for count in (1, 2, 3, 4, 6, 8, 12, 16))]


def test_whatever_a_request_may_ask_of_its_logits_is_warmed_up() -> None:
    names = ["add_at", "penalize", "mask_tokens"]
    token_sampler = DeviceTokenSampler(HostStream(torch.device("cpu")), 1, None)

    with ExitStack() as opened:
        places: list[tuple[Any, str]] = [(sampling, name) for name in names]
        spies = [
            opened.enter_context(patch.object(place, name, wraps=getattr(place, name)))
            for place, name in [*places, (token_sampler, "describe")]
        ]
        warm_up_sampling(token_sampler, 100, torch.device("cpu"))

    assert [each.call_count for each in spies] == [1, 1, 1, 1]


def fitted(llama: Path, *, free: float, step: float, **engine: object) -> EnginePlan:
    config = parse_args({"model": {"path": str(llama)}, "engine": engine})
    plan = make_plan(device="cuda", weight_bytes=2 * GIB, max_model_len=2**20, page_size=16)
    facts = read_model_facts(llama)
    return refit(
        plan,
        config,
        facts,
        free_bytes=int(free * GIB),
        total_bytes=8 * GIB,
        step_bytes=int(step * GIB),
    )


def test_kv_gets_a_share_of_what_steps_leave(llama: Path) -> None:
    plan = fitted(llama, free=1.5, step=0.5, mem_fraction=0.5)

    assert plan.kv_bytes == pytest.approx(0.5 * GIB, rel=0.01)
    assert plan.kv_tokens == plan.num_pages * 16
    assert plan.max_queued_tokens == 4 * plan.kv_tokens
    assert fitted(llama, free=1.5, step=0.5).kv_bytes == pytest.approx(0.9 * GIB, rel=0.01)


@pytest.mark.observes("engine.total_mem_fraction", "engine.memory_reserve")
def test_all_that_is_taken_may_be_a_share_of_the_whole_memory(llama: Path) -> None:
    part = fitted(llama, free=5.5, step=0.5, total_mem_fraction=0.5)
    most = fitted(llama, free=1.5, step=0.5, total_mem_fraction=0.9)
    reserved = fitted(llama, free=5.5, step=0.5, memory_reserve="4GiB", mem_fraction=0.5)

    assert part.kv_bytes == pytest.approx(1.5 * GIB, rel=0.01)  # 4 GiB less 2 and a half
    assert most.kv_bytes == pytest.approx(1.0 * GIB, rel=0.01)  # what there is
    assert reserved.kv_bytes == pytest.approx(0.5 * GIB, rel=0.01)


def test_kv_that_does_not_fit_is_refused_with_what_would(llama: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        fitted(llama, free=1.5, step=0.5, kv_memory="4GiB")

    message = str(caught.value)
    assert "weights (2 GiB), step buffers (512 MiB) and KV cache (4 GiB)" in message
    assert "need 6.5 GiB; 3.5 GiB are available, 3 GiB too few" in message
    assert "engine.kv_memory up to 1024MiB" in message
    assert "a smaller engine.max_step_tokens or max_running_requests" in message
    assert fitted(llama, free=1.5, step=0.5, kv_memory="1024MiB").kv_bytes <= GIB
