"""What the keys of CUDA graphs do, with a CPU in the device's place and reruns for graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.planning.device_plan import DevicePlan, plan_device
from remora.engine.attention.triton_backend import TritonAttention
from remora.engine.types import SamplingParams
from tests.conftest import TinyCheckpoints
from tests.engine.graphs.device_runs import Requests, Rerun, run

T = TypeVar("T")


MAX_STEP_TOKENS = 64


def plan_of(
    device: str = "cuda", max_running: int = 4, *, graph_prompt_tokens: int = 0, **engine: Any
) -> DevicePlan:
    engine |= {"graph_prompt_tokens": graph_prompt_tokens} if device == "cuda" else {}
    return plan_device(
        parse_args({"model": {"path": "x"}, "engine": engine}),
        device,
        has_triton=True,
        max_running=max_running,
        has_adapters=False,
        max_step_tokens=MAX_STEP_TOKENS,
    )


def three_requests(max_tokens: int = 8) -> Requests:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return {f"r{number}": ([10 + number] * 5, params) for number in range(3)}


@pytest.fixture(scope="module")
def llama(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints("llama")


def replays(llama: Path, max_tokens: int = 8, **engine: Any) -> int:
    """Run three requests of equal length; return how many of their steps were recorded."""
    graph_runner = Rerun()
    requests = three_requests(max_tokens)
    plan = plan_of(**engine)
    got = run(
        llama,
        requests,
        graph_runner=graph_runner,
        how=plan,
        max_step_tokens=MAX_STEP_TOKENS,
        make_attention=TritonAttention,  # torch's reads prompts on the host
    )
    assert graph_runner.num_captured == len(plan.graph_sizes) + len(plan.graph_prompt_sizes)
    assert got.token_ids() == run(llama, requests, forward="eager").token_ids()
    return graph_runner.num_replayed


@pytest.mark.observes("engine.graph_rows")
def test_exactly_the_sizes_that_are_written_are_recorded(llama: Path) -> None:
    assert plan_of(graph_rows=[3, 1, 99]).graph_sizes == (1, 3)

    assert replays(llama, graph_rows=[3]) == 7
    assert replays(llama, graph_rows=[2]) == 0


@pytest.mark.observes("engine.graph_max_rows")
def test_larger_steps_than_the_largest_graph_are_launched(llama: Path) -> None:
    assert replays(llama, graph_max_rows=3) == 7
    assert replays(llama, graph_max_rows=2) == 0
    assert replays(llama, graph_max_rows=0) == 0


@pytest.mark.observes("engine.graph_split", "engine.graph_fine", "engine.graph_step")
def test_sizes_grow_in_small_steps_and_then_in_large_ones() -> None:
    def sizes(**engine: Any) -> tuple[int, ...]:
        return plan_of(max_running=20, **engine).graph_sizes

    assert sizes() == (1, 2, 4, 8, 16, 20)
    assert sizes(graph_fine=5) == (1, 2, 4, 5, 10, 15, 20)
    assert sizes(graph_split=8) == (1, 2, 4, 8, 16, 20)
    assert sizes(graph_split=8, graph_step=6) == (1, 2, 4, 8, 12, 18, 20)


@pytest.mark.observes("engine.graph_padding")
@pytest.mark.parametrize(("padding", "replayed"), [(True, 7), (False, 0)])
def test_steps_between_two_sizes_are_padded_or_launched(
    padding: bool, replayed: int, llama: Path
) -> None:
    assert replays(llama, graph_padding=padding) == replayed  # three rows; recorded: 1, 2, 4


@pytest.mark.observes("engine.graph_max_tokens")
def test_steps_with_longer_sequences_are_launched(llama: Path) -> None:
    assert replays(llama) == 7  # of 6 to 12 tokens
    assert replays(llama, graph_max_tokens=8) == 3


@pytest.mark.observes("engine.graph_prompt_tokens")
def test_steps_with_longer_prompts_are_launched(llama: Path) -> None:
    assert replays(llama, graph_prompt_tokens=16) == 8  # three prompts of 5 tokens in one step
    assert replays(llama, graph_prompt_tokens=14) == 7
    assert replays(llama, graph_prompt_tokens=0) == 7


class Watching(Rerun):
    """Notes whether garbage could be collected."""

    could_collect: bool | None = None

    def capture(self, run: Callable[[], T]) -> Callable[[], T]:
        self.could_collect = gc.isenabled()
        return super().capture(run)


@pytest.mark.observes("engine.graph_gc")
@pytest.mark.parametrize("allowed", [True, False])
def test_garbage_is_collected_while_steps_are_recorded_or_not(allowed: bool, llama: Path) -> None:
    graph_runner = Watching()

    run(llama, three_requests(1), graph_runner=graph_runner, how=plan_of(graph_gc=allowed))

    assert graph_runner.could_collect == allowed
    assert gc.isenabled()


@pytest.mark.parametrize(
    "engine", [{"graph_max_rows": 4}, {"graph_split": 8}, {"graph_fine": 2}, {"graph_step": 4}]
)
def test_a_list_of_sizes_decides_alone(engine: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="graph_rows is set too"):
        plan_of(graph_rows=[1], **engine)


@pytest.mark.parametrize(
    "engine",
    [{"graph_rows": [1]}, {"graph_padding": False}, {"graph_max_tokens": 9}, {"graph_gc": True}],
)
def test_a_cpu_refuses_what_is_said_of_graphs(engine: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"engine\.graph_.*the model runs on a CPU"):
        plan_of("cpu", **engine)
