"""The device part of a plan: values by device, and keys that are refused."""

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
    pp_size: int = 1,
    symmetric_memory: bool = False,
    micro_batches: int | None = None,
    max_step_tokens: int = 4096,
    libraries: tuple[str, ...] = (),
    is_ours: bool = True,
    quantization: str = "none",
    **engine: Any,
) -> DevicePlan:
    config = parse_args(
        {
            "model": {"path": "x", "quantization": quantization},
            "engine": engine,
            "parallel": {
                "tp_size": tp_size,
                "pp_size": pp_size,
                "symmetric_memory": symmetric_memory,
                "micro_batches": micro_batches,
            },
        }
    )
    return plan_device(
        config,
        device=device,
        has_triton=has_triton,
        max_running=20,
        has_adapters=has_adapters,
        max_step_tokens=max_step_tokens,
        libraries=libraries,
        is_ours=is_ours,
    )


def test_a_gpu_overlaps_steps_and_captures_all_batch_sizes() -> None:
    plan = plan_of()

    assert plan.attention_backend == "triton"
    assert plan.overlap
    assert plan.graph_sizes == (1, 2, 4, 8, 16, 20)


def test_several_ranks_overlap_and_capture_like_one() -> None:
    assert plan_of(tp_size=2) == plan_of()
    assert plan_of(tp_size=2, pp_size=2, micro_batches=1) == plan_of()


def test_steps_with_prompts_are_captured_where_attention_reads_them_on_the_device() -> None:
    assert plan_of().graph_prompt_sizes[-1] == 2048
    assert plan_of(max_step_tokens=300).graph_prompt_sizes[-1] == 300
    assert plan_of(graph_prompt_tokens=40).graph_prompt_sizes == (16, 32, 40)
    assert plan_of(graph_prompt_tokens=0).graph_prompt_sizes == ()
    assert plan_of(graph_max_rows=0).graph_prompt_sizes == ()
    assert plan_of(pp_size=2).graph_prompt_sizes == ()
    assert plan_of(libraries=("fa3",), attention_backend="fa3").graph_prompt_sizes == ()


@pytest.mark.parametrize("changes", [{"device": "cpu"}, {"attention_backend": "torch"}])
def test_symmetric_memory_needs_kernels_on_gpus(changes: dict[str, Any]) -> None:
    assert plan_of(tp_size=2, symmetric_memory=True).symmetric_memory
    with pytest.raises(ConfigError, match=r"parallel\.symmetric_memory = true: needs GPUs"):
        plan_of(tp_size=2, symmetric_memory=True, **changes)


def test_graphs_have_the_sizes_that_are_written() -> None:
    assert plan_of(graph_max_rows=6, graph_fine=1).graph_sizes == (1, 2, 3, 4, 5, 6)
    assert plan_of(graph_split=8, graph_step=6).graph_sizes == (1, 2, 4, 8, 12, 18, 20)
    assert plan_of(graph_max_rows=100).graph_sizes[-1] == 20
    assert plan_of(graph_max_rows=0).graph_sizes == ()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"has_triton": False}, DevicePlan(attention_backend="torch")),
        ({"attention_backend": "torch"}, DevicePlan(attention_backend="torch")),
        ({"device": "cpu"}, ONE_BY_ONE),
        ({"device": "cpu", "overlap": False, "graph_max_rows": 0, "graph_step": 8}, ONE_BY_ONE),
    ],
)
def test_only_kernels_on_a_gpu_use_graphs_and_overlap(
    arguments: dict[str, Any], expected: DevicePlan
) -> None:
    assert plan_of(**arguments) == expected


def test_an_installed_library_is_used_where_it_is_named_only() -> None:
    installed = ("fa3", "flashinfer")

    assert plan_of(libraries=installed).attention_backend == "triton"
    named = plan_of(libraries=installed, attention_backend="fa3")
    assert (named.attention_backend, named.overlap) == ("fa3", True)
    assert named.graph_sizes == plan_of().graph_sizes


@pytest.mark.parametrize(
    ("arguments", "held"),
    [
        ({}, "stored"),
        ({"quantization": "fp8"}, "fp8"),
        ({"quantization": "int8", "attention_backend": "fa3", "libraries": ("fa3",)}, "int8"),
        ({"attention_backend": "torch"}, "dequantised"),
        ({"compile": True}, "dequantised"),
        ({"deterministic": True}, "dequantised"),
        ({"is_ours": False}, "dequantised"),
        ({"device": "cpu"}, "dequantised"),
        ({"device": "cpu", "quantization": "int4"}, "dequantised"),
    ],
)
def test_kernels_on_a_gpu_multiply_quantised_weights(arguments: dict[str, Any], held: str) -> None:
    assert plan_of(**arguments).held_weights == held


def test_switches_take_effect() -> None:
    assert not plan_of(overlap=False).overlap
    assert plan_of(deterministic=True).deterministic
    assert plan_of("cpu", deterministic=True, has_adapters=True).deterministic
    assert not plan_of().deterministic


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"device": "cpu", "overlap": True}, "engine.overlap = true: "),
        ({"device": "cpu", "graph_max_rows": 8}, "engine.graph_max_rows = 8: "),
        ({"device": "cpu", "graph_step": 8}, "engine.graph_step = 8: "),
        ({"device": "cpu", "attention_backend": "triton"}, "engine.attention_backend = triton: "),
        (
            {"pp_size": 2, "attention_backend": "flashinfer", "libraries": ("flashinfer",)},
            "= flashinfer: it plans whole steps",
        ),
        (
            {"pp_size": 2, "graph_prompt_tokens": 64},
            "engine.graph_prompt_tokens = 64: pipeline stages",
        ),
        (
            {"attention_backend": "fa3", "libraries": ("fa3",), "graph_prompt_tokens": 64},
            "engine.graph_prompt_tokens = 64: engine.attention_backend fa3",
        ),
        ({"has_triton": False, "graph_max_rows": 2}, "engine.graph_max_rows = 2: "),
        ({"has_triton": False, "attention_backend": "triton"}, "engine.attention_backend = triton"),
        ({"attention_backend": "torch", "overlap": True}, "engine.overlap = true: "),
        ({"attention_backend": "fa3"}, "= fa3: its package is not installed; available: triton"),
        ({"device": "cpu", "attention_backend": "fa3"}, "engine.attention_backend = fa3: "),
        (
            {"attention_backend": "fa3", "libraries": ("fa3",), "has_triton": False},
            "the package triton is not installed",
        ),
        (
            {"attention_backend": "fa3", "libraries": ("fa3",), "attention_splits": 4},
            "engine.attention_splits = 4: ",
        ),
        (
            {"attention_backend": "fa3", "libraries": ("fa3",), "deterministic": True},
            "engine.deterministic = true: .*attention_backend to auto",
        ),
        (
            {"attention_backend": "fa3", "libraries": ("fa3",), "is_ours": False},
            "= fa3: transformers' code",
        ),
        ({"quantization": "int4"}, "= int4: needs a CPU; on a GPU set it to fp8"),
        ({"device": "cpu", "quantization": "fp8"}, "= fp8: CPU kernels .* set it to int8"),
        ({"quantization": "fp8", "deterministic": True}, "= fp8: engine.deterministic is true"),
        ({"quantization": "int8", "attention_backend": "torch"}, "= int8: engine.attention_bac"),
        ({"quantization": "fp8", "is_ours": False}, "= fp8: transformers' code"),
        ({"deterministic": True, "tp_size": 2}, "true: .*parallel.tp_size"),
        ({"deterministic": True, "has_triton": False}, "true: .*install triton"),
        ({"deterministic": True, "has_adapters": True}, "true: .*lora.adapters"),
        (
            {"deterministic": True, "device": "cpu", "cpu_kernels": "torch"},
            "true: .*engine.cpu_kernels",
        ),
    ],
)
def test_keys_that_the_device_does_not_support_are_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_of(**arguments)
