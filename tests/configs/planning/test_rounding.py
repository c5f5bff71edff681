"""Which formats weights are rounded to on a CPU, and where an operator reads it."""

from __future__ import annotations

import pytest

from remora.configs.banner import banner
from remora.configs.planning.memory_report import lines, report
from remora.configs.planning.rounding import ROUNDINGS, loss_of
from tests.configs.planning.test_plan import make_machine, make_model, plan

WEIGHTS = {"q_proj": 150, "k_proj": 50, "v_proj": 50, "up_proj": 450, "down_proj": 300}


def test_bits_are_averaged_over_the_parts() -> None:
    bits = ROUNDINGS["int4"].bits(WEIGHTS)

    assert bits == pytest.approx((200 * 5 + 50 * 8.5 + 750 * 6) / 1000)
    assert bits < 6


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        ("int8", "int8, 8.50 bits a weight"),
        ("int4", "int5 (q_proj int4, k_proj int4, v_proj int8), 5.92 bits a weight"),
        ("int4_pure", "int4, 5.00 bits a weight"),
    ],
)
def test_banner_and_report_name_the_formats_and_their_bits(quantization: str, text: str) -> None:
    facts = make_model(linear_weights=WEIGHTS)

    made = plan(facts=facts, model={"quantization": quantization})

    assert made.rounding == text
    assert f"{text}, bfloat16 KV" in banner(made, facts, make_machine(), {}, version="1")
    assert f"weights {text}\n" in "\n".join(lines(report(made, facts, is_native=True), made))


def test_scales_of_int8_are_fewer_where_tile_registers_multiply_64_inputs() -> None:
    vectors = ("avx512_vnni", "avx512_bf16")
    machine = make_machine(cpu_features=(*vectors, "amx_tile", "amx_int8", "amx_bf16"))
    facts = make_model(linear_weights=WEIGHTS)

    tiled = plan(facts=facts, machine=machine, model={"quantization": "int8"})
    usual = plan(
        facts=facts, machine=make_machine(cpu_features=vectors), model={"quantization": "int8"}
    )

    assert tiled.rounding == "int8, 8.25 bits a weight"
    assert tiled.weight_bytes < usual.weight_bytes
    assert tiled.formats is not None
    assert tiled.formats.groups == {64}
    losses = loss_of("int8", usual.formats), loss_of("int8", tiled.formats)
    assert losses == ("0.6 %", "1.2 %")


def test_no_loss_is_named_that_was_not_measured() -> None:
    overridden = plan(
        facts=make_model(linear_weights=WEIGHTS),
        model={
            "quantization": "int8",
            "quantization_overrides": [{"parts": ["v_proj"], "format": "int4"}],
        },
    )

    assert not loss_of("int8", overridden.formats)
    assert not loss_of("int8", None)


def test_parts_that_a_model_does_not_have_are_not_named() -> None:
    facts = make_model(linear_weights={"q_a_proj": 100, "down_proj": 100})

    assert plan(facts=facts, model={"quantization": "int4"}).rounding == "int5, 6.00 bits a weight"
