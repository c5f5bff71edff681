"""What `remora plan` says before anything is loaded, beside what then lies in memory."""

from __future__ import annotations

import gc
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from remora.configs.load import parse_args
from remora.configs.planning.memory_report import report
from remora.configs.planning.plan import make_plan
from remora.engine.launch import build_engine, read_machine
from remora.engine.models.facts import read_model_facts
from remora.engine.parallel.layout import Layout
from remora.engine.runner.device import make_attention
from remora.kernels.memory import Arena
from tests.conftest import TinyCheckpoints
from tests.engine.loaded import load_f32

WIDE = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6}
LATENTS = {
    "hidden_size": 256,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "moe_intermediate_size": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
}
EXPERTS = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 16}


def live_bytes() -> int:
    """Return the bytes of all tensors' memory, each counted once."""
    gc.collect()
    storages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Tensors of other types are descriptions of tensors, which compilers leave behind.
        tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, Parameter)]
    for tensor in tensors:
        if tensor.is_mkldnn:  # packed by torch, which does not say where
            storages[id(tensor)] = tensor.numel() * tensor.element_size()
        elif tensor.device.type == "cpu" and not tensor.is_sparse:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("family", "shape", "dtype", "engine"),
    [
        ("llama", {}, "float32", {"cpu_kernels": "torch"}),
        ("llama", {}, "bfloat16", {}),
        ("llama", WIDE, "float32", {}),
        ("llama", WIDE, "bfloat16", {"cpu_kernels": "torch"}),
        ("llama", WIDE, "float16", {}),
        ("smollm2", {}, "bfloat16", {}),
        ("qwen3-moe", EXPERTS, "bfloat16", {}),
        ("deepseek-v3", LATENTS, "float32", {}),
        ("deepseek-v3", LATENTS, "float16", {}),
        ("deepseek-v3", {}, "float32", {"cpu_kernels": "torch"}),
    ],
)
def test_an_engine_takes_what_was_planned(
    family: str,
    shape: dict[str, Any],
    dtype: str,
    engine: dict[str, Any],
    tiny_checkpoints: TinyCheckpoints,
    smollm2_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # What is not written to in a segment of 64 MiB costs nothing, but would be counted here.
    small = partial(Arena, segment_bytes=2**16)
    monkeypatch.setattr("remora.engine.graphs.step_builder.Arena", small)
    path = smollm2_path if family == "smollm2" else tiny_checkpoints(family, **shape)
    sizes = {"kv_tokens": 8192, "max_step_tokens": 256, "max_running_requests": 16}
    config = parse_args(
        {
            "model": {"path": str(path), "dtype": dtype},
            "engine": {**sizes, "device": "cpu", "num_threads": 2, **engine},
        }
    )
    facts = read_model_facts(path)
    plan = make_plan(config, facts, read_machine(config), path)
    before = live_bytes()
    built = build_engine(config, show_progress=False)
    try:
        taken = live_bytes() - before
    finally:
        built.engine.close()
    is_native = "native" in built.kernels
    planned = report(plan, facts, is_native=is_native)
    expected = planned.total_bytes - (0 if is_native else planned.step_bytes)
    assert taken == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_of_three_takes_what_was_planned(smollm2_path: Path, rank: int) -> None:
    config = parse_args(
        {
            "model": {"path": str(smollm2_path), "dtype": "float32"},
            "engine": {"kv_tokens": 8192, "device": "cpu"},
            "parallel": {"tp_size": 3},
        }
    )
    facts = read_model_facts(smollm2_path)
    plan = make_plan(config, facts, read_machine(config), smollm2_path)
    before = live_bytes()
    model = load_f32(smollm2_path, layout=Layout(rank=rank, tp_size=3, pp_size=1))
    model.pack()
    attention = make_attention(model, plan, plan.num_pages)
    taken = live_bytes() - before
    del attention, model
    assert taken == pytest.approx(plan.weight_bytes + plan.kv_bytes, rel=0.05)
