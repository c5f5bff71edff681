"""Cases of the native tests: inputs, the values that torch expects, and where known their bits."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from remora.kernels import sampling as reference
from remora.kernels.cpu.library import Epilogue, Format
from remora.kernels.cpu.packing import PACKED
from tests.kernels.cpu.attending import Heads, attend_densely
from tests.kernels.cpu.native.arithmetic import (
    Bf16Sum,
    MultiplyAdd,
    dot_bf16,
    dot_float32,
    dot_grouped,
    fused,
    normalise,
    quantise_bytes,
    quantise_from_least,
    quantise_rows,
    separate,
)
from tests.kernels.cpu.products import EPS
from tests.kernels.cpu.test_attention import TOLERANCE
from tests.kernels.cpu.test_sampling import make_logits, make_rows, top_p_is_clear
from tests.kernels.test_sampling import CLOSE
from tests.sampling_kernels import racing_times

Values = Mapping[str, Tensor | int | float]
# How weights are rounded in formats whose scales are searched.
SEARCHED = {
    Format.Q4: partial(quantise_from_least, top=15, number=torch.bfloat16),
    Format.Q5_1: partial(quantise_from_least, top=31, number=torch.float16),
}
BYTES = {
    Format.Q8: partial(quantise_bytes, size=64, number=torch.bfloat16),
    Format.Q8_0: partial(quantise_bytes, size=32, number=torch.float16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the bits of a library depend on.

    fuses:     multiply-adds are rounded once
    bf16_sum:  None = unknown
    """

    fuses: bool
    bf16_sum: Bf16Sum | None

    @property
    def add(self) -> MultiplyAdd:
        return fused if self.fuses else separate


def write_cases(folder: Path, target: Target) -> list[Path]:
    """Write all cases for a target; return their files."""
    return [write_case(folder / f"{name}.case", values) for name, values in all_cases(target)]


def write_case(path: Path, values: Values) -> Path:
    """Write the inputs and results of one case as records; `main.cpp` describes them."""
    with path.open("wb") as file:
        for name, value in values.items():
            array = _as_array(value)
            file.write(f"{name} {array.dtype.str[1:]} {array.size}\n".encode() + array.tobytes())
    return path


def _as_array(value: Tensor | int | float) -> npt.NDArray[Any]:
    if isinstance(value, Tensor):
        return value.contiguous().numpy()
    return np.array(value, np.int32 if isinstance(value, int) else np.float32)


def all_cases(target: Target) -> Iterator[tuple[str, Values]]:
    """Yield each case by its name, which begins with its kind."""
    for format in PACKED:
        for n, k, rows in [(64, 64, 1), (150, 83, 13), (2, 1, 3), (70, 520, 33)]:
            for epilogue in Epilogue:
                name = f"product-{format.name}-{epilogue.name}-{n}x{k}-{rows}".lower()
                yield name, _product(format, epilogue, n, k, rows, target, _seeded(name))
    for size, span in [(1, 1), (15, 15), (96, 96), (576, 576), (128, 32)]:
        for is_centered in (False, True):
            name = f"norm-{'layer' if is_centered else 'rms'}-{size}-{span}"
            yield name, _norm(size, span, is_centered, target, _seeded(name))
    for name, heads in ATTENTION.items():
        for dtype in TOLERANCE:
            case = f"attention-{name}-{Format.of(dtype).name.lower()}"
            yield case, _attention(heads, dtype, zlib.crc32(case.encode()))
    for vocab_size, spread, step in [(5, 1.0, 0.0), (129, 3.0, 0.5), (5000, 2.0, 0.0)]:
        yield f"sampling-{vocab_size}", _sampling(vocab_size, spread, step)


def _seeded(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def _product(
    format: Format,
    epilogue: Epilogue,
    n: int,
    k: int,
    rows: int,
    target: Target,
    generator: torch.Generator,
) -> Values:
    weight, x = (torch.randn(size, k, generator=generator) for size in (n, rows))
    if format in SEARCHED:  # on a grid, which the search for one finds again
        levels, scale, least = SEARCHED[format](weight)
        weight = (levels * scale[..., None] + least[..., None]).flatten(1)[:, :k].contiguous()
    start = torch.randn(rows, n, generator=generator)
    values: dict[str, Tensor | int | float] = {
        "weight": weight, "x": x, "format": format, "epilogue": epilogue,
        "n": n, "k": k, "rows": rows,
    }  # fmt: skip
    bits, product, bound = _multiplied(format, x, weight, target)
    if epilogue is Epilogue.GATED:
        (gates, ups), (gate_bound, up_bound) = product.chunk(2, 1), bound.chunk(2, 1)
        opened = torch.nn.functional.silu(gates)
        # The slope of silu is at most 1.1; exp has an error of a few units.
        bound = 1.1 * gate_bound * (ups.abs() + up_bound) + opened.abs() * up_bound
        bound += (8 + 2 * gates.abs()) * EPS[torch.float32] * (opened * ups).abs() + 1e-30
        return {**values, "expected": opened * ups, "bound": bound}
    bias = torch.randn(n, generator=generator)
    values["bias"] = bias
    bits, product = None if bits is None else bits + bias, product + bias
    if epilogue is Epilogue.ADD:
        values["start"] = start
        bits, product = None if bits is None else bits + start, product + start
    bound = bound + 2 * EPS[torch.float32] * (bias.abs() + product.abs() + start.abs())
    if bits is not None:
        values["bits"] = bits
    return {**values, "expected": product, "bound": bound}


def _multiplied(
    format: Format, x: Tensor, w: Tensor, target: Target
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return x w^T of rounded values: its bits, exactly, and the bound of its error."""
    bits: Tensor | None
    if format.is_grouped:
        columns = SEARCHED[format](w) if format in SEARCHED else BYTES[format](w)
        rows = quantise_rows(x, columns[0].shape[2], target.add)
        bits = dot_grouped(rows, columns, target.add)
        x = (rows[0].double() * rows[1].double().unsqueeze(2)).flatten(1)
        w = columns[0].double() * columns[1].double().unsqueeze(2)
        parts = w.abs()
        if columns[2] is not None:
            least = columns[2].double().unsqueeze(2)
            w, parts = w + least, parts + least.abs()
        w, magnitude = w.flatten(1), x.abs() @ parts.flatten(1).T
    else:
        if format is Format.BF16:
            x, w = x.bfloat16().float(), w.bfloat16().float()
            how = target.bf16_sum
            bits = None if how is None else dot_bf16(x, w, target.add, how)
        else:
            w = w.half().float() if format is Format.F16 else w
            bits = dot_float32(x, w, target.add)
        x, w = x.double(), w.double()
        magnitude = x.abs() @ w.abs().T
    # A sum of k products is rounded k times; rounding to odd has twice the error.
    rounding = EPS[torch.float32] * (2 if target.bf16_sum is Bf16Sum.BFDOT else 1)
    return bits, x @ w.T, (x.shape[1] + 8) * rounding * magnitude


def _norm(
    size: int, span: int, is_centered: bool, target: Target, generator: torch.Generator
) -> Values:
    rows, epsilon = 7, 1e-5
    x = torch.randn(rows, size, generator=generator) * 3 + 1
    weight, bias = (torch.randn(size, generator=generator) for _ in range(2))
    values: dict[str, Tensor | int | float] = {
        "rows": rows, "x": x, "weight": weight, "span": span, "is_centered": int(is_centered),
        "epsilon": epsilon, **({"bias": bias} if is_centered else {}),
    }  # fmt: skip
    bits, exact = [], []
    for part in torch.arange(size).view(-1, span):
        shift = bias[part] if is_centered else None
        arguments = weight[part], shift, is_centered, float(np.float32(epsilon))
        bits.append(normalise(x[:, part], *arguments, target.add))
        wide = x[:, part].double()
        apart = wide - wide.mean(1, keepdim=True) if is_centered else wide
        unit = apart / (apart.square().mean(1, keepdim=True) + arguments[3]).sqrt()
        exact.append(unit * weight[part] + (0 if shift is None else shift))
    expected = torch.cat(exact, 1)
    # Values of a layer norm are differences with the mean of values of up to about 10.
    scale = expected.abs() + bias.abs() + (10 * weight.abs() / span**-0.5 if is_centered else 0)
    bound = (span**0.5 + 8) * EPS[torch.float32] * scale
    return {**values, "bits": torch.cat(bits, 1), "expected": expected, "bound": bound}


ATTENTION = {
    "plain": Heads(),
    "grouped": Heads(num_kv_heads=1, heads_per_kv=8, head_dim=64, page_size=32),
    "window": Heads(heads_per_kv=2, head_dim=80, window=30, soft_cap=5.0, sink=1.0),
    "slopes": Heads(heads_per_kv=1, head_dim=24, slope=0.5, page_size=64),
    "chunked": Heads(head_dim=128, num_kv_heads=1, window=70, chunked=True),
}


def _attention(heads: Heads, dtype: torch.dtype, seed: int) -> Values:
    num_tokens = 300 if heads.head_dim == 16 else 140  # more than a partition, once
    heads = replace(heads, dtype=dtype)
    qkv, half = heads.draw(num_tokens, seed), heads.head_dim // 2
    angles = torch.arange(num_tokens)[:, None] * 10000 ** -(torch.arange(half) / half)
    cosines, sines = angles.cos(), angles.sin()
    turned = qkv.clone()
    queries_and_keys = heads.num_heads + heads.num_kv_heads
    a, b = qkv[:, :queries_and_keys, :half], qkv[:, :queries_and_keys, half : 2 * half]
    turned[:, :queries_and_keys, :half] = a * cosines[:, None] - b * sines[:, None]
    turned[:, :queries_and_keys, half:] = b * cosines[:, None] + a * sines[:, None]
    expected = attend_densely(heads, turned)
    optional = {"sinks": heads.sinks, "slopes": heads.slopes}
    # A last bit of a rotated key may decide how it is rounded.
    tolerance = TOLERANCE[dtype] + (2.0**-9 if dtype == torch.float16 else 0.0)
    return {
        **{name: value for name, value in optional.items() if value is not None},
        "rows": num_tokens, "num_heads": heads.num_heads, "num_kv_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim, "page_size": heads.page_size,
        "kv_format": Format.of(dtype), "window": heads.window or 0,
        "is_chunked": int(heads.chunked), "scale": heads.scale, "soft_cap": heads.soft_cap or 0.0,
        "qkv": qkv, "cosines": cosines, "sines": sines,
        "expected": expected, "bound": tolerance * (1 + expected.abs()),
    }  # fmt: skip


def _sampling(vocab_size: int, spread: float, step: float) -> Values:
    """Sample rows in which rounding decides neither top-p nor who wins a race."""
    seed, top = vocab_size, min(4, vocab_size)
    logits, params = make_logits(seed, (24, vocab_size), spread, step), make_rows(seed, 24)
    keys = np.random.default_rng(seed).integers(-(2**63), 2**63, 24)
    heat = np.where(params["temperature"] > 0, params["temperature"], 1)[:, None]
    times = racing_times(keys, np.exp(logits.double().numpy() / heat))
    drawn, _ = reference.choose(logits.clone(), keys=keys, **params)
    is_close = np.abs(times / np.take_along_axis(times, drawn[:, None], 1) - 1) < CLOSE
    clear = [
        row
        for row in range(24)
        if top_p_is_clear(logits[row].numpy(), {name: each[row] for name, each in params.items()})
        and is_close[row].sum() == 1
    ]
    logits, params = logits[clear], {name: each[clear] for name, each in params.items()}
    rng = np.random.default_rng(seed)
    keys, drawn, tokens = keys[clear], drawn[clear], rng.integers(0, vocab_size, len(clear))
    _, ranks, top_ids, _ = reference.token_logprobs(logits, tokens, top)
    exact = logits.double().log_softmax(-1).numpy()
    own, best = exact[range(len(clear)), tokens][:, None], np.take_along_axis(exact, top_ids, 1)
    expected = np.hstack([drawn[:, None], own, ranks[:, None], top_ids, best])
    bound = np.zeros_like(expected)
    bound[:, 1], bound[:, -top:] = 1e-5, 1e-5
    arrays = {**params, "keys": keys, "token": tokens, "expected": expected, "bound": bound}
    return {
        **{name: torch.from_numpy(array) for name, array in arrays.items()},
        "logits": logits, "rows": len(clear), "num_top": top,
    }  # fmt: skip
