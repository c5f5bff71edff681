"""What a configuration asks for, of adapters beside the weights."""

from __future__ import annotations

from typing import Any

from remora.configs.load import parse_args
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.lora.setup import configured


def room(**lora: Any) -> LoRASlotConfig | None:
    args = {"model": {"path": "base"}, "lora": lora}
    return configured(parse_args(args).lora).room


def test_there_is_room_for_adapters_that_may_come() -> None:
    assert room() is None
    assert room(dynamic=True) is not None


def test_the_room_is_as_large_as_the_operator_says() -> None:
    made = room(dynamic=True, max_loras_per_batch=3, max_lora_rank=5, target_modules=["v_proj"])

    assert made == LoRASlotConfig(num_slots=3, max_rank=5, targets=("v_proj",))


def test_the_operator_says_who_leaves_first() -> None:
    made = room(dynamic=True, eviction="fifo")

    assert made is not None
    assert made.eviction == "fifo"
