"""What `remora plan` prints: parts that add up, and requests that fit."""

from __future__ import annotations

from typing import Any

import pytest

from remora.configs.facts import ModelFacts
from remora.configs.planning.memory_report import MemoryReport, lines, report
from remora.configs.planning.plan import EnginePlan
from tests.configs.planning.test_plan import GIB, make_model, plan

WINDOWS = (None, 64) * 15


def reported(model: ModelFacts, /, **sections: Any) -> tuple[MemoryReport, EnginePlan]:
    made = plan(facts=model, **sections)
    return report(made, model, is_native=made.device == "cpu"), made


@pytest.mark.parametrize(
    "shape", [{}, {"windows": WINDOWS}, {"experts_per_token": 4}, {"dtype": "float32"}]
)
def test_the_parts_add_up_and_longer_sequences_are_fewer(shape: dict[str, Any]) -> None:
    found, made = reported(make_model(**shape))

    assert found.total_bytes == made.weight_bytes + made.kv_bytes + found.step_bytes
    lengths, numbers = zip(*found.concurrency, strict=True)
    assert lengths[-1] == made.max_model_len
    assert list(numbers) == sorted(numbers, reverse=True)
    assert all(0 < number <= made.max_running_requests for number in numbers)


def test_steps_of_more_tokens_and_more_experts_take_more_memory() -> None:
    found = [
        reported(model, engine={"max_step_tokens": tokens})[0].step_bytes
        for model, tokens in (
            (make_model(), 256),
            (make_model(), 2048),
            (make_model(experts_per_token=2), 2048),
            (make_model(experts_per_token=8), 2048),
        )
    ]

    assert found == sorted(set(found))


def test_drafts_need_lines_of_logits_as_far_as_a_step_has_tokens() -> None:
    engine = {"max_running_requests": 100, "max_step_tokens": 500}
    found = [
        reported(make_model(), engine=engine, speculation=section)[0].step_bytes
        for section in (
            {},
            *({"method": "ngram", "max_drafts": drafts} for drafts in (1, 4, 9)),
        )
    ]

    assert found == sorted(found)
    assert len(set(found)) == 3
    assert found[-1] == found[-2]


def test_the_text_names_each_part_and_what_other_memories_hold() -> None:
    found, made = reported(make_model(windows=WINDOWS), engine={"kv_tokens": 1600})

    text = "\n".join(lines(found, made, [GIB, 2**20]))

    for name in ("model", "device", "weights", "KV cache", "windows", "steps", "together", "batch"):
        assert f"\n{name} " in f"\n{text}"
    assert "KV cache   " in text
    assert "1,600 tokens of" in text
    assert "the 15 of 30 layers that look back 64 at most" in text
    assert text.count("tokens of KV cache") == 1
    assert text.endswith("the weights do not fit")
