"""Which formats weights are rounded to on a CPU, and where an operator reads it."""

from __future__ import annotations

import pytest

from remora.configs.banner import banner
from remora.configs.planning.memory_report import lines
from remora.configs.planning.rounding import BITS, ROUNDINGS
from tests.configs.planning.test_memory_report import reported
from tests.configs.planning.test_plan import make_machine, make_model, plan

WEIGHTS = {"q_proj": 300, "v_proj": 100, "gate_proj": 300, "down_proj": 300}


def test_values_and_down_projections_stay_in_8_bits() -> None:
    rounding = ROUNDINGS["int4"]

    assert rounding.format_of("down_proj") == rounding.format_of("v_proj") == "int8"
    assert rounding.format_of("q_proj") == rounding.format_of("gate_proj") == "int4"
    assert rounding.bits(WEIGHTS) == pytest.approx(0.6 * BITS["int4"] + 0.4 * BITS["int8"])


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        ("int8", "int8, 8.25 bits a weight"),
        ("int4", "int4 with v_proj and down_proj in int8, 6.30 bits a weight"),
        ("int4_pure", "int4, 5.00 bits a weight"),
    ],
)
def test_banner_and_report_name_the_formats_and_their_bits(quantization: str, text: str) -> None:
    facts = make_model(linear_weights=WEIGHTS)
    model = {"quantization": quantization}

    found, made = reported(facts, model=model)

    assert made.rounding == text
    assert f"{text}, bfloat16 KV" in banner(made, facts, make_machine(), {}, version="1")
    assert f"weights {text}\n" in "\n".join(lines(found, made))


def test_parts_that_a_model_does_not_have_are_not_named() -> None:
    facts = make_model(linear_weights={"q_a_proj": 100, "down_proj": 100})

    assert plan(facts=facts, model={"quantization": "int4"}).rounding == (
        "int4 with down_proj in int8, 6.62 bits a weight"
    )
