"""Bytes and operations of a model, compared with counts by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.planning.rounding import ROUNDINGS, Rounding
from remora.deployments.bench.roofline import (
    Bounds,
    ModelWork,
    _positions_seen,
    bound_share,
    decode_bound,
    model_work,
)
from remora.engine.models.checkpoint import read_config
from remora.engine.models.decoder import DecoderModel
from remora.engine.runner.forward import step_weight_bytes
from tests.conftest import TinyCheckpoints

BOUNDS = Bounds(
    num_threads=2, read_gb_s_1=20.0, read_gb_s=30.0, bf16_gflop_s=400.0, int8_gop_s=800.0
)


def make_work(**changes: object) -> ModelWork:
    values: dict[str, object] = {
        "block_parameters": 1000,
        "head_parameters": 100,
        "step_bytes": 2200.0,
        "is_int8": False,
        "attention_flops_per_position": 4,
        "windows": (None,),
    }
    return ModelWork(**(values | changes))  # type: ignore[arg-type]


def test_parameters_are_those_of_the_matrices(
    tiny_checkpoints: TinyCheckpoints, smollm2_path: Path
) -> None:
    work = model_work(read_config(tiny_checkpoints("llama")), dtype="bfloat16")

    attention = 96 * 96 + 2 * 96 * 32 + 96 * 96
    assert work.block_parameters == 3 * (attention + 3 * 96 * 128)
    assert work.head_parameters == 512 * 96
    assert work.step_bytes == 2 * (work.block_parameters + work.head_parameters)
    built_in = model_work(read_config(smollm2_path), dtype="bfloat16")
    assert built_in.step_bytes == pytest.approx(269e6, rel=0.01)


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen2-moe", "deepseek-v2-lite", "deepseek-v3"])
def test_a_token_s_own_experts_count_alone(family: str, tiny_checkpoints: TinyCheckpoints) -> None:
    config = read_config(tiny_checkpoints(family))
    model = DecoderModel(config, dtype=torch.float32, device="meta")

    worked_out = model_work(config, dtype="float32").step_bytes

    # Norms and biases are read too.
    assert worked_out <= step_weight_bytes(model) < 1.05 * worked_out


def test_keys_and_values_of_latents_are_multiplied_as_heads(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    work = model_work(read_config(tiny_checkpoints("deepseek-v3")), dtype="float32")

    # 6 heads; keys of 16 and 8 that are rotated, values of 20.
    assert work.attention_flops_per_position == 2 * 6 * (16 + 8 + 20)


def test_quantized_weights_are_fewer_bytes(tiny_checkpoints: TinyCheckpoints) -> None:
    config = read_config(tiny_checkpoints("llama"))

    full, int8, int4 = (
        model_work(config, dtype="bfloat16", quantization=mode).step_bytes
        for mode in ("none", "int8", "int4")
    )

    assert int8 == pytest.approx(full / 2 * (1 + 2 / 32))
    tiles = replace(ROUNDINGS["int8"], int8_group=64)
    tiled = model_work(config, dtype="bfloat16", quantization="int8", rounding=tiles).step_bytes
    assert tiled == pytest.approx(full / 2 * (1 + 2 / 64))
    unrounded = model_work(
        config, dtype="float32", rounding=Rounding(usual="none", head="none")
    ).step_bytes
    assert unrounded == 2 * full
    assert full / 4 < int4 < int8
    assert model_work(config, dtype="bfloat16", step_bytes=1234.0).step_bytes == 1234.0


def test_operations_of_a_request() -> None:
    # Three tokens in, two out: positions 0 to 3 are computed, the head runs twice.
    assert make_work().flops(3, 2) == 2 * 1000 * 4 + 2 * 100 * 2 + 4 * (1 + 2 + 3 + 4)
    # Two cached tokens are only attended to.
    assert make_work().flops(3, 1, num_cached=2) == 2 * 1000 + 2 * 100 + 4 * 3


@given(st.integers(0, 30), st.integers(0, 30), st.integers(1, 12) | st.none())
def test_positions_seen_is_the_sum_over_queries(first: int, more: int, window: int | None) -> None:
    last = first + more

    expected = sum(min(at + 1, window or at + 1) for at in range(first, last))

    assert _positions_seen(first, last, window) == expected


def test_decoding_is_bound_by_reading() -> None:
    work = make_work(step_bytes=300e6)

    assert decode_bound(work, BOUNDS) == pytest.approx(100.0)
    share = bound_share(
        {"decode_tok_s": 80.0}, work, BOUNDS, num_requests=1, num_inputs=128, num_outputs=256
    )
    assert share == pytest.approx(0.8)


def test_prompts_are_bound_by_products_in_the_mode_s_format() -> None:
    figures = {"seconds": 1.0}
    plain = make_work(block_parameters=10**8, windows=())
    int8 = make_work(block_parameters=10**8, windows=(), is_int8=True)

    shares = [
        bound_share(figures, work, BOUNDS, num_requests=1, num_inputs=1000, num_outputs=1)
        for work in (plain, int8)
    ]

    assert shares[0] == pytest.approx(2e11 / 400e9, rel=1e-3)
    assert shares[1] == pytest.approx(shares[0] / 2)


def test_the_better_of_two_bounds_counts() -> None:
    other = replace(BOUNDS, read_gb_s_1=25.0, read_gb_s=28.0, bf16_gflop_s=500.0, int8_gop_s=None)

    assert BOUNDS.best(other) == replace(BOUNDS, read_gb_s_1=25.0, bf16_gflop_s=500.0)
