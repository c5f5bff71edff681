"""Tile registers: the emulation follows their definition, and the hardware the emulation."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remora.kernels.cpu import build
from remora.kernels.cpu.build import InstructionSet, load_library
from remora.kernels.cpu.library import Epilogue, Format, Library, Team
from tests.kernels.cpu.attending import Heads, run_in_chunks
from tests.kernels.cpu.conftest import load
from tests.kernels.cpu.products import make_rows, multiply, pack_alone

SMALLEST_NORMAL = 2.0**-126


@pytest.fixture(scope="module")
def tiles() -> Iterator[Team]:
    """Two threads with emulated tile registers."""
    team = Team(load(InstructionSet.EMULATED), 2)
    yield team
    team.close()


@pytest.fixture(scope="module")
def hardware() -> Iterator[Team]:
    """Two threads with AMX; skipped where there is none."""
    team = Team(load(InstructionSet.AMX), 2)
    yield team
    team.close()


def as_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def flushed(value: float) -> float:
    return value if abs(value) >= SMALLEST_NORMAL else math.copysign(0.0, value)


def fused(a: float, b: float, c: float) -> float:
    """Return a b + c, rounded once to float32.

    With few significant bits in a and b the product and almost always the sum are exact in float64.
    """
    return flushed(as_float32(flushed(a) * flushed(b) + c))


def defined(x: list[float], w: list[float]) -> float:
    """Return a sum of products as CPUs define it: 32 k at a time, even and odd ones apart."""
    total = 0.0
    for start in range(0, len(x), 32):
        even = odd = 0.0
        for k in range(start, min(start + 32, len(x)), 2):
            even = fused(x[k], w[k], even)
            if k + 1 < len(x):
                odd = fused(x[k + 1], w[k + 1], odd)
        total = flushed(as_float32(total + flushed(as_float32(even + odd))))
    return total


def product(team: Team, x: Tensor, w: Tensor, format: Format, **options: object) -> Tensor:
    packed = pack_alone(team, w, None, format, gated=options.get("epilogue") is Epilogue.GATED)
    return multiply(team, make_rows(team, format, x), packed, **options)  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 40),
    k=st.integers(1, 200),
    exponent=st.sampled_from([0, -60, -64, -126]),
    seed=st.integers(0, 2**31),
)
def test_sums_follow_the_definition(
    tiles: Team, rows: int, k: int, exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Powers of two near the ends of the range, so that products and inputs may be denormal.
    scale = 2.0**exponent * torch.exp2(torch.randint(-6, 6, (1, k), generator=generator).float())
    x = (torch.randn(rows, k, generator=generator) * scale).bfloat16().float()
    w = torch.randn(2, k, generator=generator) * (1.0 if exponent == -126 else 2.0**exponent)
    w = w.bfloat16().float()

    out = product(tiles, x, w, Format.BF16)

    for row in range(rows):
        for column in range(2):
            expected = defined(x[row].tolist(), w[column].tolist())
            assert out[row, column].item() == expected, (row, column)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70),
    k=st.integers(1, 300),
    n=st.integers(1, 140),
    format=st.sampled_from([Format.Q8, Format.Q8_0, Format.Q4]),
    seed=st.integers(0, 2**31),
)
def test_quantised_products_have_the_same_bits_as_without_tiles(
    tiles: Team, team: Team, rows: int, k: int, n: int, format: Format, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(size, k, generator=generator) for size in (rows, n))

    assert torch.equal(product(tiles, x, w, format), product(team, x, w, format))


@pytest.mark.parametrize("format", [Format.BF16, Format.Q8, Format.Q8_0, Format.Q4])
@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize("k", [83, 3000])
def test_bits_do_not_depend_on_the_number_of_rows(
    tiles: Team, format: Format, epilogue: Epilogue, k: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(65, k, generator=generator), torch.randn(150, k, generator=generator)
    whole = product(tiles, x, w, format, epilogue=epilogue)

    for first, last in [(0, 1), (3, 4), (0, 15), (5, 22), (30, 63)]:
        part = product(tiles, x[first:last], w, format, epilogue=epilogue)
        assert torch.equal(part, whole[first:last])


@pytest.mark.parametrize("format", [Format.BF16, Format.Q8, Format.Q8_0, Format.Q4])
@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 33, 64, 201])
def test_hardware_equals_the_emulation(
    hardware: Team, tiles: Team, format: Format, epilogue: Epilogue, rows: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, w = torch.randn(rows, 1100, generator=generator), torch.randn(150, 1100, generator=generator)
    x[:, :100] *= 2.0**-120
    w[:, :100] *= 2.0**-10

    assert torch.equal(
        product(hardware, x, w, format, epilogue=epilogue),
        product(tiles, x, w, format, epilogue=epilogue),
    )


RULES: tuple[dict[str, Any], ...] = ({}, {"window": 30, "sink": 1.0, "soft_cap": 5})
TILED_HEADS = (
    [
        Heads(dtype=torch.bfloat16, page_size=page_size, head_dim=head_dim, **rule)
        for page_size in (16, 32)
        for head_dim in (16, 64, 80)
        for rule in RULES
    ]
    + [
        Heads(dtype=torch.bfloat16, kv_dtype=kv_dtype, head_dim=80, **rule)
        for kv_dtype in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
        for rule in RULES
    ]
    + [
        Heads(
            dtype=torch.bfloat16, kv_dtype=torch.int8, heads_per_kv=heads_per_kv, head_dim=head_dim
        )
        for heads_per_kv, head_dim in ((1, 64), (40, 96), (3, 128))
    ]
)


@pytest.mark.parametrize("heads", TILED_HEADS, ids=str)
def test_attention_has_the_same_bits_in_chunks(tiles: Team, heads: Heads) -> None:
    qkv = heads.draw(150, seed=1)
    whole = run_in_chunks(tiles, heads, qkv, [150])

    assert torch.equal(run_in_chunks(tiles, heads, qkv, [1, 6, 64, 13, 17, 49], seed=9), whole)


@pytest.mark.parametrize("heads", TILED_HEADS, ids=str)
def test_attention_of_the_hardware_equals_the_emulation(
    hardware: Team, tiles: Team, heads: Heads
) -> None:
    qkv = heads.draw(150, seed=1)

    on_hardware = run_in_chunks(hardware, heads, qkv, [100, 1, 49])
    assert torch.equal(on_hardware, run_in_chunks(tiles, heads, qkv, [100, 1, 49]))


BYTE_HEADS = [
    Heads(dtype=torch.bfloat16, kv_dtype=torch.int8, heads_per_kv=each, head_dim=dim, **rule)
    for each, dim in ((1, 64), (3, 80), (8, 16), (40, 128))
    for rule in (*RULES, {"static": 2.0}, {"page_size": 32, "slope": 0.1})
]


@pytest.mark.parametrize("heads", BYTE_HEADS, ids=str)
def test_attention_in_bytes_has_the_same_bits_by_vectors(tiles: Team, heads: Heads) -> None:
    library = load(InstructionSet.AVX512)
    if not library.has_byte_products():
        pytest.skip("this CPU has no VNNI")
    team = Team(library, 2)
    qkv = heads.draw(600, seed=1)  # three partitions

    by_vectors = run_in_chunks(team, heads, qkv, [70, 1, 528, 1], seed=3)
    team.close()
    assert torch.equal(by_vectors, run_in_chunks(tiles, heads, qkv, [600]))


def test_a_refused_permission_leaves_the_products_without_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The library for AMX is replaced by one that a system refuses tiles to."""
    flags = build.read_cpu_flags()
    if build.best_instruction_set(flags) not in (InstructionSet.AMX, InstructionSet.AVX512):
        pytest.skip("this CPU has no AVX-512")
    monkeypatch.setattr(build, "best_instruction_set", lambda _: InstructionSet.AMX)
    refusing = tmp_path / "refusing"
    refusing.mkdir()
    (refusing / "api.cpp").write_text('extern "C" int remora_may_use_tiles() { return 0; }\n')

    library = load_library(tmp_path / "cache", source_dir=refusing)

    assert "avx512" in library._name
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "the system refuses AMX to this process; products use AVX-512, more slowly"
    ]


def test_instructions_are_named(tiles: Team) -> None:
    assert isinstance(tiles.library, Library)
    assert tiles.library.instructions == "emulated tiles"
