"""The kernels of most of a step's time, compiled for Hopper; `test_compiled.py` compiles all."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kernels.gpu.ahead.needs import bytes_in_flight
from tests.kernels.gpu.ahead.occupancy import MULTIPROCESSORS, compiled
from tests.kernels.gpu.ahead.rules import faults_of

CASES = (
    "attention/decode, heads of 128",
    "attention/extend, heads of 128",
    "moe/bfloat16, 8 tokens",
    "moe/bfloat16, 4096 tokens",
)
NEEDS = {
    "family": "moe",
    "case": "bfloat16, 8 tokens",
    "kernel": "experts_kernel",
    "shared": 109 * 1024,
    "warps": 4,
    "registers": 92,
    "local": 0,
    "wgmma": 16,
    "mma": 0,
    "wide": 54,
    "narrow": 0,
    "in_flight": 72 * 1024,
}


def test_decode_prefill_and_experts() -> None:
    made = compiled("sm_90", CASES)

    assert {each["kernel"] for each in made} > {"split_kernel", "extend_kernel", "experts_kernel"}
    assert [
        (each["case"], each["kernel"], faults_of(each)) for each in made if faults_of(each)
    ] == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"local": 2}, "uses local memory"),
        ({"wgmma": 0, "mma": 16}, "does not use wgmma"),
        ({"wide": 0}, "does not copy 16 bytes at a time"),
        ({"narrow": 8}, "copies fewer than 16 bytes at a time"),
        ({"in_flight": 10_000, "registers": 200}, "has 20000 bytes in flight"),
    ],
)
def test_faults_are_found(change: dict[str, Any], fault: str) -> None:
    assert faults_of(NEEDS) == []
    assert faults_of({**NEEDS, **change}) == [fault]


@pytest.mark.parametrize(
    ("change", "programs"),
    [
        ({}, 2),  # of shared memory
        ({"shared": 0}, 5),  # of registers
        ({"shared": 0, "registers": 24}, 16),  # of warps
        ({"shared": 0, "registers": 24, "warps": 1}, 32),
        ({"registers": 255, "warps": 16}, 0),
    ],
)
def test_programs_are_limited_by_what_there_is_least_of(
    change: dict[str, Any], programs: int
) -> None:
    assert MULTIPROCESSORS["sm_90"].programs_of({**NEEDS, **change}) == programs


def test_bytes_in_flight_are_those_of_buffers_that_live_at_once() -> None:
    buffers = "%a = ttg.local_alloc : () -> !ttg.memdesc<3x64x128xbf16, #s>\n"
    other = "%b = ttg.local_alloc : () -> !ttg.memdesc<2x32x64xi8, #s>\n"
    ended = "ttg.local_dealloc %a : !ttg.memdesc<3x64x128xbf16, #s>\n"
    loads = "%c = tt.load %d : tensor<4x1024x!tt.ptr<f32>, #b>\n"

    assert bytes_in_flight(buffers + other) == 2 * 64 * 128 * 2 + 32 * 64
    assert bytes_in_flight(buffers + ended + other + loads) == 2 * 64 * 128 * 2
    assert bytes_in_flight(loads + loads) == 2 * 4 * 1024 * 4
