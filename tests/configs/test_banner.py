from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remora.configs.banner import banner
from remora.configs.load import parse_args
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.configs.planning.plan import make_plan
from tests.configs.planning.test_plan import make_machine, make_model

MODEL = make_model()
MACHINE = make_machine(num_cores=2, cpu_name="Test CPU")


def make_banner(
    engine: dict[str, Any] | None = None,
    *,
    parallel: dict[str, int] | None = None,
    slots: LoRASlotConfig | None = None,
    **more: Any,
) -> str:
    config = parse_args(
        {"model": {"path": "tiny"}, "engine": engine or {}, "parallel": parallel or {}}
    )
    plan = make_plan(config, MODEL, MACHINE, Path("/models/tiny"), slots)
    phases = {"config": 0.5, "weights": 1.25}
    return banner(plan, MODEL, MACHINE, phases, version="9.9", **more)


@pytest.mark.parametrize(
    "part",
    [
        "remora 9.9",
        "tiny (LlamaForCausalLM, 135M parameters, 30 layers)",
        "/models/tiny",
        "cpu, 2 threads on 2 cores (Test CPU)",
        "256.57 MiB bfloat16",
        "16,384 tokens in 1,024 pages",
        "2.0 sequences of full length (8,192)",
        "1.8 s (config 0.5 s, weights 1.2 s)",
        "first token  41 ms",
        "http://127.0.0.1:8000/v1",
        "note         eager torch",
    ],
)
def test_the_banner_says_what_is_running(part: str) -> None:
    text = make_banner(
        {"kv_tokens": 16384},
        endpoints=["http://127.0.0.1:8000/v1"],
        notes=["eager torch"],
        first_token_s=0.041,
    )

    assert part in text


def test_what_is_not_there_is_not_shown() -> None:
    text = make_banner({"kv_tokens": 512})

    assert "a sequence ends at 512 tokens" in text
    assert [word for word in ("serving", "ranks", "adapters") if word in text] == []


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"tp_size": 3}, "ranks        3: 3 share each layer"),
        ({"pp_size": 2}, "2: 2 stages of layers, one for each stage; steps in 2 parts"),
        (
            {"tp_size": 3, "pp_size": 2, "micro_batches": 1},
            "ranks        6: 2 stages of layers, 3 share each layer; steps in 1 part",
        ),
    ],
)
def test_the_banner_says_how_ranks_divide_the_model(parallel: dict[str, int], said: str) -> None:
    assert said in make_banner(parallel=parallel)


def test_the_banner_shows_the_memory_of_adapter_slots() -> None:
    slots = LoRASlotConfig(num_slots=4, max_rank=16, targets=("q_proj", "down_proj"))

    assert "adapters     4 slots of rank 16, 17.58 MiB" in make_banner(slots=slots)
