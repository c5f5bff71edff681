"""Report which kernels are compiled again as the number of rows changes.

    python tests/kernels/gpu/ahead/row_keys.py MAX_ROWS STRIDE

A program of its own, because triton either interprets or compiles for as long as a process lives.
Launches of the functions that models call with a step's rows are recorded for the row counts of a
warm-up, and then for others. Prints a line of JSON for each case: its name, the number of keys of
warm-up, and keys that other numbers of rows need, each with the first that does.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[4]))

from tests.kernels.gpu.ahead.absent import pretend, record_keys  # isort: skip

import torch

from remora.engine.runner.device import ladder
from remora.kernels.activation import silu_and_mul
from remora.kernels.gpu.arch import Arch
from remora.kernels.kv_store import store_kv
from remora.kernels.linear_invariant import linear_invariant
from remora.kernels.norm import add_rms_norm, rms_norm
from remora.kernels.rope import apply_rope
from tests.kernels.gpu.devices import empty
from tests.kernels.gpu.launches import linear_quant, moe

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
HIDDEN = 4096


def norm(rows: int) -> None:
    x, weight = empty(rows, HIDDEN, dtype=BF16), empty(HIDDEN, dtype=BF16)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, empty(rows, HIDDEN, dtype=BF16), weight, 1e-5)


def store(rows: int, stored: torch.dtype) -> None:
    heads = empty(rows, 48, 128, dtype=BF16)
    pages = empty(2, 1000, 16, 8, 128, dtype=stored)
    slots, scales = empty(rows, dtype=torch.int64), empty(*pages.shape[:4], dtype=BF16)
    store_kv(heads[:, 32:40], heads[:, 40:], pages, slots, scales if stored != BF16 else None)


def rope(rows: int) -> None:
    heads, angles = empty(rows, 48, 128, dtype=BF16), empty(rows, 64, dtype=BF16)
    apply_rope(heads[:, :40], angles, angles, interleaved=False)


CASES: dict[str, Callable[[int], object]] = {
    "norm": norm,
    "rope": rope,
    "activation": lambda rows: silu_and_mul(empty(rows, 2 * HIDDEN, dtype=BF16)),
    "invariant": lambda rows: linear_invariant(
        empty(rows, HIDDEN, dtype=BF16), empty(6144, HIDDEN, dtype=BF16)
    ),
    **{f"store {dtype}": partial(store, stored=dtype) for dtype in (BF16, torch.int8, FP8)},
    **{f"experts {dtype}": partial(moe.layer, dtype=dtype) for dtype in (BF16, FP8)},
    **{f"experts {name}": partial(moe.grouped, name) for name in ("int4 32", "mxfp4")},
    **{
        f"{weight} {dtype}": partial(linear_quant.launch, weight, dtype=dtype)
        for weight in linear_quant.WEIGHTS
        for dtype in (BF16, FP32)
    },
}


def main(max_rows: int, stride: int) -> None:
    keys = record_keys()
    for arch in (Arch.HOPPER, Arch.AMPERE):
        pretend(arch, "meta")
        for name, launch in CASES.items():
            keys.clear()
            for rows in ladder(max_rows):
                launch(rows)
            warm = set(keys)
            missing: dict[str, int] = {}
            for rows in range(1, max_rows + 1, stride):
                launch(rows)
                for key in keys - warm:
                    missing.setdefault(" ".join(key), rows)
            made = {"case": name, "arch": arch.value, "warm": len(warm), "missing": missing}
            sys.stdout.write(json.dumps(made) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
