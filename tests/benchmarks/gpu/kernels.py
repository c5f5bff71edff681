"""Every kernel alone, for shapes of models.

    python tests/benchmarks/gpu/kernels.py --bounds BYTES_PER_S,FLOPS_PER_S [--first N]

A kernel's share is the time that its bytes or its multiplications would take at the speeds of the
device, whichever is longer, of what it took. What lies in a cache, or multiplies in 8 bits, may
have a share above 1; what is small is all launch. A worker of `run.py`, which tells what it finds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.benchmarks.gpu import workers
from tests.benchmarks.gpu.bounds import Bounds
from tests.benchmarks.gpu.rows import Measured
from tests.benchmarks.gpu.timing import Case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--bounds", type=Bounds.parse, required=True)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "0"  # read when triton is first imported
    device = torch.device("cuda")
    for place, case in enumerate(cases(tiny=False)):
        if place >= options.first:
            about = Measured.of(case)
            workers.begin(place, asdict(about))
            workers.tell(asdict(measure(case, about, device, options.bounds)))
            torch.cuda.synchronize()  # raises where the GPU is lost: another worker goes on
            torch.cuda.empty_cache()


def measure(case: Case, about: Measured, device: torch.device, bounds: Bounds) -> Measured:
    """Return what a case has taken, or why it has not come to an end."""
    try:
        return about.timed(case.seconds(device), bounds)
    except Exception as error:
        return replace(about, failure=f"FAILED: {type(error).__name__}: {error}")


def interpret() -> Iterator[Measured]:
    """Call each kernel once on tiny inputs, where there is no GPU."""
    interpret_on_cpu()
    for case in cases(tiny=True):
        # The interpreter cannot multiply bfloat16.
        case.once(torch.device("cpu"), torch.float16)
        yield Measured.of(case)


def interpret_on_cpu() -> None:
    """Let the kernels have tensors of a CPU, and no more programs than a few."""
    import remora.kernels.dispatch
    from remora.kernels.gpu.attention import decode as attention_decode

    remora.kernels.dispatch.TRITON_DEVICES = frozenset({"cpu"})
    attention_decode.LAUNCHES = {
        arch: {size: replace(launch, programs=8) for size, launch in of_arch.items()}
        for arch, of_arch in attention_decode.LAUNCHES.items()
    }


def cases(*, tiny: bool) -> Iterator[Case]:
    """Yield everything that is measured, model by model."""
    from tests.benchmarks.gpu import (
        attention_cases,
        lora_cases,
        product_cases,
        row_cases,
        shapes,
    )

    models: dict[str, dict[str, Any]] = {
        "llama-3.1-8b": shapes.LLAMA_8B,
        "qwen3-0.6b": shapes.QWEN3_06B,
        "qwen3-30b-a3b": shapes.QWEN3_30B,
    }
    for name, config in {"tiny": shapes.TINY_MOE}.items() if tiny else models.items():
        yield from attention_cases.cases(name, config, tiny=tiny)
        yield from row_cases.cases(name, config, tiny=tiny)
        if "num_experts" in config:
            yield from product_cases.expert_cases(name, config, tiny=tiny)
        if tiny or name == "llama-3.1-8b":
            yield from product_cases.cases(name, config, tiny=tiny)
    yield from lora_cases.cases(tiny=tiny)


if __name__ == "__main__":
    main()
