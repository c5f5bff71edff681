"""Every kernel and the engine on a GPU, beside what the device can do at best.

    python tests/benchmarks/gpu/run.py [--only kernels|engine] [--json PATH] [--interpret]

The device's speed of copying and of multiplying bfloat16 is measured first; a kernel's share is the
time that its bytes or its multiplications would take at those speeds, whichever is longer, of what
it took. What lies in a cache, or multiplies in 8 bits, may have a share above 1; what is small is
all launch. Prints one table and writes it as JSON. `--interpret` calls each kernel once on tiny
inputs where there is no GPU, and times nothing; `engine.py` tells of the other half.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.benchmarks.gpu.bounds import Bounds, measure_bounds
from tests.benchmarks.gpu.timing import Case

ENGINE_MODELS = ("qwen3-0.6b", "llama-3.1-8b")


@dataclass(frozen=True, slots=True)
class Measured:
    """A kernel's time; `limit` names what its share is of. Interpreted ones have no time.

    failure:  why there is none otherwise
    """

    model: str
    kernel: str
    shape: str
    num_bytes: float
    flops: float
    microseconds: float | None = None
    share: float | None = None
    limit: str = ""
    failure: str = ""

    def line(self) -> str:
        times = ""
        if self.microseconds is not None and self.share is not None:
            times = f"{self.microseconds:11.1f} us {self.share:7.1%} of {self.limit}"
        return f"{self.model:14} {self.kernel:28} {self.shape:34} {times}{self.failure}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=["kernels", "engine"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--interpret", action="store_true")
    options = parser.parse_args()
    # Triton reads it when it is first imported.
    os.environ["TRITON_INTERPRET"] = "1" if options.interpret else "0"
    if not options.interpret and not torch.cuda.is_available():
        sys.exit("There is no GPU; --interpret checks the kernels without one.")
    device = torch.device("cpu" if options.interpret else "cuda")
    bounds = measure_bounds(device)
    copied, multiplied = bounds.bytes_per_s / 1e12, bounds.flops_per_s / 1e12
    sys.stdout.write(f"copies {copied:.3f} TB/s, multiplies {multiplied:.1f} TFLOP/s\n")
    found: dict[str, list[dict[str, Any]]] = {"kernels": [], "engine": []}
    if options.only != "engine":
        for measured in measure_kernels(device, bounds, tiny=options.interpret):
            found["kernels"].append(tell(measured))
    if options.only != "kernels":
        from tests.benchmarks.gpu.engine import measure_engine

        for name in ("tiny",) if options.interpret else ENGINE_MODELS:
            for part in measure_engine(
                name, bounds, tiny=options.interpret, peer=not options.interpret
            ):
                found["engine"].append(tell(part))
    if options.json:
        about = {"machine": machine(device), "bounds": asdict(bounds)}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**about, **found}, indent=1))
    if any(each["failure"] for each in found["kernels"]):
        sys.exit("Some kernels failed.")


def tell(measured: Any) -> dict[str, Any]:
    """Print a line, and return what it says."""
    sys.stdout.write(measured.line() + "\n")
    sys.stdout.flush()
    return asdict(measured)


def measure_kernels(device: torch.device, bounds: Bounds, *, tiny: bool) -> Iterator[Measured]:
    """Measure each case, or call it once where kernels are interpreted."""
    if tiny:
        interpret_on_cpu()
    for case in cases(tiny=tiny):
        named = case.model, case.kernel, case.shape, case.num_bytes, case.flops
        if tiny:
            # The interpreter cannot multiply bfloat16.
            case.once(device, torch.float16)
            yield Measured(*named)
            continue
        try:
            seconds = case.seconds(device)
        except (RuntimeError, ValueError) as error:  # the others are measured all the same
            yield Measured(*named, failure=f"FAILED: {error}")
            continue
        moved_s, computed_s = case.num_bytes / bounds.bytes_per_s, case.flops / bounds.flops_per_s
        limit = "bytes" if moved_s >= computed_s else "products"
        share = max(moved_s, computed_s) / seconds
        yield Measured(*named, microseconds=seconds * 1e6, share=share, limit=limit)
        torch.cuda.empty_cache()


def interpret_on_cpu() -> None:
    """Let the kernels have tensors of a CPU, and no more programs than a few."""
    import remora.kernels.dispatch
    from remora.kernels.gpu import attention_decode

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

    models = {
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


def machine(device: torch.device) -> dict[str, str]:
    """Return what the figures depend on besides the code."""
    packages = {}
    for name in ("torch", "triton", "transformers"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "none"
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else platform.processor(),
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **packages,
    }


if __name__ == "__main__":
    main()
