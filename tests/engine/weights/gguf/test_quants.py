"""Every type of block against what it means: the library's own quantiser, or the formula."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from remora.configs.errors import ConfigError
from remora.engine.weights.gguf import quants as gguf_quants
from remora.engine.weights.gguf.file import read_gguf
from remora.kernels.quantised.block_weight import BLOCK_TYPES
from tests.engine.weights.gguf.converter import writing

Floats = npt.NDArray[np.float32]
ROWS, COLUMNS = 3, 512
RNG = np.random.default_rng(5)
# Of values between -1 and 1, the most that rounding to codes may move one; scales are float16.
QUANTISED = {
    Kind.F32: 0.0,
    Kind.F16: 2**-11,
    Kind.BF16: 2**-8,
    Kind.Q8_0: 0.5 / 127 + 1e-3,
    Kind.Q5_0: 1 / 16 + 1e-3,
    Kind.Q5_1: 1 / 31 + 1e-3,
    Kind.Q4_0: 1 / 8 + 1e-3,
    Kind.Q4_1: 1 / 15 + 1e-3,
    Kind.TQ1_0: 0.5 + 1e-3,
    Kind.TQ2_0: 0.5 + 1e-3,
    Kind.MXFP4: 0.25 + 1e-3,
}


def write(file: Path, kind: Kind, blocks: npt.NDArray[np.uint8]) -> Path:
    with writing(file, "llama") as writer:
        writer.add_tensor("x", blocks, raw_dtype=kind)
    return file


def read(file: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    (tensor,) = read_gguf(file).tensors
    return tensor.read(dtype)


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_values_come_back_as_near_as_the_type_can_hold_them(kind: Kind, tmp_path: Path) -> None:
    values = RNG.uniform(-1, 1, (ROWS, COLUMNS)).astype(np.float32)

    found = read(write(tmp_path / "x.gguf", kind, gguf.quantize(values, kind)))

    assert found.shape == (ROWS, COLUMNS)
    assert (found.float() - torch.from_numpy(values)).abs().max() <= QUANTISED[kind]


def bits(codes: npt.NDArray[np.uint8], shifts: list[int], mask: int) -> npt.NDArray[np.int64]:
    """Return the parts of each byte at the shifts: [len(shifts), len(codes)]."""
    found: npt.NDArray[np.int64] = codes.astype(np.int64)[None, :] >> np.array(shifts)[:, None]
    return found & mask


def floats(values: Any) -> Floats:
    found: Floats = np.asarray(values, dtype=np.float32)
    return found


def half(block: npt.NDArray[np.uint8], start: int) -> float:
    return float(block[start : start + 2].view(np.float16)[0])


def scales_of_k4(block: npt.NDArray[np.uint8]) -> tuple[list[int], list[int]]:
    """Return 8 scales and 8 minima of 6 bits out of 12 bytes."""
    s = [int(byte) for byte in block]
    low = [s[i] & 63 for i in range(4)] + [(s[i + 8] & 15) | (s[i] >> 6 << 4) for i in range(4)]
    high = [s[i + 4] & 63 for i in range(4)] + [
        (s[i + 8] >> 4) | (s[i + 4] >> 6 << 4) for i in range(4)
    ]
    return low, high


def q2_k(block: npt.NDArray[np.uint8]) -> Floats:
    d, low = half(block, 80), half(block, 82)
    codes = np.concatenate(
        [bits(block[16 + h : 48 + h], [0, 2, 4, 6], 3).reshape(-1) for h in (0, 32)]
    )
    scale, floor = np.repeat(block[:16] & 15, 16), np.repeat(block[:16] >> 4, 16)
    return floats(d * scale * codes - low * floor)


def q3_k(block: npt.NDArray[np.uint8]) -> Floats:
    high = bits(block[:32], list(range(8)), 1).reshape(-1)
    low = np.concatenate(
        [bits(block[32 + h : 64 + h], [0, 2, 4, 6], 3).reshape(-1) for h in (0, 32)]
    )
    s = block[96:108].astype(np.int64)
    four = np.concatenate([s[:8] & 15, s[:8] >> 4])
    scale = four | (bits(s[8:12].astype(np.uint8), [0, 2, 4, 6], 3).reshape(-1) << 4)
    codes = low - 4 * (1 - high)
    return floats(half(block, 108) * np.repeat(scale - 32, 16) * codes)


def q4_k(block: npt.NDArray[np.uint8]) -> Floats:
    scale, floor = scales_of_k4(block[4:16])
    codes = np.concatenate(
        [bits(block[16 + 32 * i : 48 + 32 * i], [0, 4], 15).reshape(-1) for i in range(4)]
    )
    return floats(
        half(block, 0) * np.repeat(scale, 32) * codes - half(block, 2) * np.repeat(floor, 32)
    )


def q5_k(block: npt.NDArray[np.uint8]) -> Floats:
    scale, floor = scales_of_k4(block[4:16])
    high = bits(block[16:48], list(range(8)), 1).reshape(-1)
    low = np.concatenate(
        [bits(block[48 + 32 * i : 80 + 32 * i], [0, 4], 15).reshape(-1) for i in range(4)]
    )
    codes = low + 16 * high
    return floats(
        half(block, 0) * np.repeat(scale, 32) * codes - half(block, 2) * np.repeat(floor, 32)
    )


def q6_k(block: npt.NDArray[np.uint8]) -> Floats:
    low = np.concatenate([bits(block[64 * h : 64 * h + 64], [0, 4], 15) for h in (0, 1)])
    high = np.concatenate(
        [bits(block[128 + 32 * h : 160 + 32 * h], [0, 2, 4, 6], 3).reshape(-1) for h in (0, 1)]
    )
    codes = (low.reshape(-1) | (high << 4)) - 32
    scale = np.repeat(block[192:208].view(np.int8).astype(np.int64), 16)
    return floats(half(block, 208) * scale * codes)


def q8_k(block: npt.NDArray[np.uint8]) -> Floats:
    return float(block[:4].view(np.float32)[0]) * block[4:260].view(np.int8).astype(np.float32)


def q1_0(block: npt.NDArray[np.uint8]) -> Floats:
    signs = [(int(block[2 + i // 8]) >> i % 8) & 1 for i in range(128)]
    return np.array([half(block, 0) * (2 * sign - 1) for sign in signs], dtype=np.float32)


STEPS_OF_IQ4 = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]


def iq4_nl(block: npt.NDArray[np.uint8]) -> Floats:
    codes = bits(block[2:], [0, 4], 15).reshape(-1)
    return floats(half(block, 0) * np.array(STEPS_OF_IQ4)[codes])


def iq4_xs(block: npt.NDArray[np.uint8]) -> Floats:
    high = int(block[2:4].view(np.uint16)[0])
    scale = [
        ((int(block[4 + i // 2]) >> 4 * (i % 2)) & 15) | (((high >> 2 * i) & 3) << 4)
        for i in range(8)
    ]
    codes = np.concatenate(
        [bits(block[8 + 16 * i : 24 + 16 * i], [0, 4], 15).reshape(-1) for i in range(8)]
    )
    steps = np.array(STEPS_OF_IQ4)[codes]
    return floats(half(block, 0) * (np.repeat(scale, 32) - 32) * steps)


FORMULAS: dict[Kind, Callable[[npt.NDArray[np.uint8]], Floats]] = {
    Kind.Q2_K: q2_k,
    Kind.Q3_K: q3_k,
    Kind.Q4_K: q4_k,
    Kind.Q5_K: q5_k,
    Kind.Q6_K: q6_k,
    Kind.Q8_K: q8_k,
    Kind.Q1_0: q1_0,
    Kind.IQ4_NL: iq4_nl,
    Kind.IQ4_XS: iq4_xs,
}
# Where a block has its float16 scales; random bits there may be no numbers.
SCALES_AT = {
    Kind.Q2_K: (80, 82),
    Kind.Q3_K: (108,),
    Kind.Q4_K: (0, 2),
    Kind.Q5_K: (0, 2),
    Kind.Q6_K: (208,),
    Kind.IQ1_M: (),
    Kind.MXFP4: (),
}


def random_blocks(kind: Kind) -> npt.NDArray[np.uint8]:
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = RNG.integers(0, 256, (ROWS, COLUMNS // values, size), dtype=np.uint8)
    for start in SCALES_AT.get(kind, (0,)):
        scales = RNG.uniform(0.1, 1, blocks.shape[:2]).astype(np.float16)
        blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
    if kind is Kind.IQ1_M:  # its scale lies in the highest 4 bits of 4 numbers
        blocks[..., 55] = blocks[..., 55] & 0x0F | 0x30
    if kind is Kind.Q8_K:
        blocks[..., :4] = np.array([0.25], dtype=np.float32).view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", FORMULAS, ids=lambda kind: kind.name)
def test_blocks_mean_what_their_formula_says(kind: Kind, tmp_path: Path) -> None:
    blocks = random_blocks(kind)

    found = read(write(tmp_path / "x.gguf", kind, blocks.reshape(ROWS, -1)))

    expected = np.stack([np.concatenate([FORMULAS[kind](b) for b in row]) for row in blocks])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-6)


CODEBOOKS = [
    Kind.IQ1_S,
    Kind.IQ1_M,
    Kind.IQ2_XXS,
    Kind.IQ2_XS,
    Kind.IQ2_S,
    Kind.IQ3_XXS,
    Kind.IQ3_S,
]


@pytest.mark.parametrize("kind", [*CODEBOOKS, Kind.NVFP4], ids=lambda kind: kind.name)
def test_blocks_of_codebooks_are_the_librarys_in_any_number_format(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_quants, "VALUES_AT_ONCE", 256)
    blocks = random_blocks(kind).reshape(ROWS, -1)
    file = write(tmp_path / "x.gguf", kind, blocks)
    (tensor,) = read_gguf(file).tensors

    expected = torch.from_numpy(gguf.dequantize(blocks, kind))

    assert expected.isfinite().all()
    assert len(set(expected.flatten().tolist())) > 8
    assert torch.equal(read(file), expected)
    assert torch.equal(tensor.read(torch.bfloat16, num_threads=2), expected.bfloat16())


def test_several_threads_convert_in_inference_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_quants, "VALUES_AT_ONCE", 256)
    file = write(tmp_path / "x.gguf", Kind.Q6_K, random_blocks(Kind.Q6_K).reshape(ROWS, -1))
    (tensor,) = read_gguf(file).tensors

    with torch.inference_mode():
        found = tensor.read(torch.bfloat16, num_threads=2)

    assert torch.equal(found, tensor.read(torch.bfloat16))


def test_every_type_of_the_library_is_read_but_those_that_no_file_has() -> None:
    tried = {*QUANTISED, *FORMULAS, *CODEBOOKS, Kind.NVFP4, Kind.F64}

    unread = {kind.name for kind in Kind if not gguf_quants.is_readable(kind)}

    assert unread == {"Q8_1", "I8", "I16", "I32", "I64"}
    assert unread == {kind.name for kind in Kind} - {kind.name for kind in tried}


def test_a_type_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf", Kind.I8, np.zeros((2, 32), dtype=np.int8))

    with pytest.raises(ConfigError, match=r"x\.gguf holds x as I8, which"):
        read_gguf(file)


def test_blocks_of_mxfp4_are_a_weight_of_4_bit_floats(tmp_path: Path) -> None:
    blocks = random_blocks(Kind.MXFP4)
    blocks[..., 0] %= 250
    blocks[0, :3, 0] = torch.arange(3)
    (tensor,) = read_gguf(write(tmp_path / "x.gguf", Kind.MXFP4, blocks.reshape(ROWS, -1))).tensors

    assert tensor.is_kind
    assert torch.equal(
        tensor.weight().dequantised(),
        torch.from_numpy(gguf.dequantize(blocks.reshape(ROWS, -1), Kind.MXFP4)),
    )


def test_an_exponent_that_is_no_number_is_named(tmp_path: Path) -> None:
    blocks = random_blocks(Kind.MXFP4).reshape(ROWS, -1)
    blocks[:, ::17] %= 250
    blocks[1, 17] = 255
    (tensor,) = read_gguf(write(tmp_path / "x.gguf", Kind.MXFP4, blocks)).tensors

    with pytest.raises(
        ConfigError, match=r"x in \S+x\.gguf cannot be decoded: a scale is infinite"
    ):
        tensor.weight()


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_a_scale_that_is_no_number_is_named(kind: str, number: float, tmp_path: Path) -> None:
    bad = np.array([number], dtype=np.float16).view(np.uint8)
    for start in BLOCK_TYPES[kind].starts:
        type = BLOCK_TYPES[kind]
        blocks = np.zeros((ROWS, COLUMNS // type.size, type.num_bytes), dtype=np.uint8)
        blocks[1, -1, start : start + 2] = bad
        file = write(tmp_path / "x.gguf", Kind[kind], blocks.reshape(ROWS, -1))
        (tensor,) = read_gguf(file).tensors

        with pytest.raises(ConfigError, match=r"x in \S+x\.gguf cannot be decoded: a scale is inf"):
            tensor.weight()
        with np.errstate(all="ignore"):
            assert not tensor.read().isfinite().all()  # the number is where the library has it


@pytest.mark.parametrize("kind", [Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4], ids=lambda kind: kind.name)
def test_blocks_that_are_cut_off_are_named(kind: Kind, tmp_path: Path) -> None:
    file = write(tmp_path / "x.gguf", kind, random_blocks(kind).reshape(ROWS, -1))
    file.write_bytes(file.read_bytes()[:-40])

    with pytest.raises(ConfigError, match=rf"x, {kind.name} \[{ROWS}, {COLUMNS}\], ends at byte"):
        read_gguf(file)
