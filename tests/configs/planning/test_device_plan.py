"""How a step runs on its device; and what is refused there, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.planning.device_plan import ONE_BY_ONE, DevicePlan, plan_device


def plan_of(
    device: str = "cuda",
    *,
    has_triton: bool = True,
    has_adapters: bool = False,
    tp_size: int = 1,
    **engine: Any,
) -> DevicePlan:
    config = parse_args(
        {"model": {"path": "x"}, "engine": engine, "parallel": {"tp_size": tp_size}}
    )
    return plan_device(
        config,
        device=device,
        has_triton=has_triton,
        max_running=20,
        has_adapters=has_adapters,
    )


def test_a_gpu_overlaps_steps_and_records_them_for_all_rows() -> None:
    plan = plan_of()

    assert plan.attention_backend == "triton"
    assert plan.overlap
    assert plan.graph_sizes == (1, 2, 4, 8, 16, 20)


def test_graphs_have_the_sizes_that_are_written() -> None:
    assert plan_of(graph_max_rows=6, graph_fine=1).graph_sizes == (1, 2, 3, 4, 5, 6)
    assert plan_of(graph_split=8, graph_step=6).graph_sizes == (1, 2, 4, 8, 12, 18, 20)
    assert plan_of(graph_max_rows=100).graph_sizes[-1] == 20
    assert plan_of(graph_max_rows=0).graph_sizes == ()


def test_overlap_can_be_turned_off() -> None:
    assert not plan_of(overlap=False).overlap


def test_without_triton_a_gpu_takes_torch() -> None:
    assert plan_of(has_triton=False) == DevicePlan(attention_backend="torch")
    assert plan_of(attention_backend="torch") == DevicePlan(attention_backend="torch")


def test_a_cpu_takes_one_step_after_the_other() -> None:
    assert plan_of("cpu") == ONE_BY_ONE
    assert plan_of("cpu", overlap=False, graph_max_rows=0, graph_step=8) == ONE_BY_ONE


def test_rows_are_kept_apart_where_that_is_asked_for() -> None:
    assert plan_of(deterministic=True).deterministic
    assert plan_of("cpu", deterministic=True, has_adapters=True).deterministic
    assert not plan_of().deterministic


def test_ranks_launch_their_steps() -> None:
    assert plan_of(tp_size=2) == DevicePlan(attention_backend="triton")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "cpu", "overlap": True}, "engine.overlap = true: the model runs on a CPU"),
        ({"device": "cpu", "graph_max_rows": 8}, "engine.graph_max_rows = 8: the model runs on a"),
        ({"device": "cpu", "graph_step": 8}, "engine.graph_step = 8: the model runs on a CPU"),
        ({"device": "cpu", "attention_backend": "triton"}, "attention_backend = triton: the model"),
        ({"tp_size": 2, "overlap": True}, "engine.overlap = true: several ranks take their steps"),
        ({"tp_size": 2, "graph_fine": 2}, "engine.graph_fine = 2: several ranks"),
        ({"has_triton": False, "graph_max_rows": 2}, "graph_max_rows = 2: attention by torch"),
        ({"has_triton": False, "attention_backend": "triton"}, "triton is not installed; install"),
        ({"attention_backend": "torch", "overlap": True}, "engine.overlap = true: attention by"),
        ({"deterministic": True, "tp_size": 2}, "engine.deterministic = true: several ranks add"),
        ({"deterministic": True, "has_triton": False}, "true: on a GPU that takes triton's"),
        ({"deterministic": True, "has_adapters": True}, "true: on a GPU the sums of adapters in"),
        (
            {"deterministic": True, "device": "cpu", "cpu_kernels": "torch"},
            "true: engine.cpu_kernels is torch, whose sums depend",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(**arguments)
