"""The speed lines of quantised models in one run: both sides of each ratio in turns.

    python -m tests.benchmarks.quantise.lines FOLDER [--rounds 3] [--only gguf]

Writes the models that FOLDER lacks, then prints a row for each line: the ratio of every round, its
median and what is wanted. GGUF files are compared with llama.cpp's tools (`peers/run.py install
llama.cpp`) on the same file with as many threads, integers of 4 bits with bfloat16, and K and V in
int8 with bfloat16. `K-quants` asserts that the file has tensors of Q4_K and Q6_K.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf

from remora.deployments.bench.workloads import OFFLINE, Workload
from remora.engine.weights.resolve_model import SMOLLM2
from remora.engine.weights.smollm2 import INSTALL, PACKAGE, find_packaged_gguf
from tests.benchmarks.peers.llama_bench import measure
from tests.benchmarks.peers.peers import llama_tool
from tests.benchmarks.quantise.loading import BFLOAT16, MODEL, Case, write

INT4 = "int4, groups of 128"
TWICE: Mapping[str, Any] = {**MODEL, "hidden_size": 2048, "intermediate_size": 6144}
LAYERS = 28
DECODE = OFFLINE["decode"]
SHORT = 32  # tokens of prompt and reply in batches of the random models
LONG, LONG_REPLY = 7900, 128
# One stream reads its weights for each token, which are the larger part in bfloat16.
LONG_CASES: Mapping[str, tuple[int, tuple[object, ...]]] = {
    "one stream": (1, ()),
    "one stream, weights in int8": (1, ("--set", "model.quantization=int8")),
    "four streams": (4, ()),
}

Side = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A ratio: what, the two rates, and the least that is wanted."""

    name: str
    ours: Side
    other: Side
    wanted: float


def main() -> None:
    """Measure every line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="lines whose name contains this")
    options = parser.parse_args()
    rows = ["| line | rates | ratios | median | wanted |", "|---|---|---|---:|---:|"]
    for line in lines(options.folder):
        if options.only not in line.name:
            continue
        pairs = [(line.ours(), line.other()) for _ in range(options.rounds)]
        ratios = [ours / other for ours, other in pairs]
        rates = ", ".join(f"{ours:.4g} : {other:.4g}" for ours, other in pairs)
        rows.append(
            f"| {line.name} | {rates} | {', '.join(f'{each:.2f}' for each in ratios)} | "
            f"{statistics.median(ratios):.2f} | {line.wanted} |"
        )
        sys.stderr.write(rows[-1] + "\n")
    sys.stdout.write("\n".join(rows) + "\n")


def lines(folder: Path) -> list[Line]:
    """Return all lines; their models are written when a side first needs them."""
    batches = {
        "SmolLM2, Q4_0": (lambda: smollm2(folder, "Q4_0"), 128),
        "SmolLM2, Q8_0": (lambda: smollm2(folder, "Q8_0"), 128),
        "random 0.6 B, Q4_K_M": (lambda: k_quants(folder, "0.6b"), SHORT),
        "random 1.5 B, Q4_K_M": (lambda: k_quants(folder, "1.5b"), SHORT),
    }
    found = []
    for name, (file, size) in batches.items():
        batch = Workload(name="batch", num_requests=32, input_tokens=size, output_tokens=size)
        found += [
            against_llama(f"gguf {name}, one stream", file, DECODE, wanted=1.15),
            against_llama(f"gguf {name}, 32 streams", file, batch, wanted=2.0),
        ]
    for name, model in (("0.6 B", MODEL), ("1.5 B", TWICE)):
        quantised = partial(folder_of, folder, name, INT4, model)
        found += [
            against_bfloat16(name, quantised, partial(folder_of, folder, name, BFLOAT16, model)),
            against_bound(name, quantised),
        ]
    for case, (streams, more) in LONG_CASES.items():
        found.append(
            Line(
                name=f"kv int8 : bfloat16 after {LONG} tokens, {case}",
                ours=partial(decode_after, LONG, "int8", streams, *more),
                other=partial(decode_after, LONG, "bfloat16", streams, *more),
                wanted=1.3,
            )
        )
    return found


def against_bfloat16(name: str, int4: Callable[[], Path], plain: Callable[[], Path]) -> Line:
    """Return a line: one stream of the same shape in integers of 4 bits and in bfloat16."""
    return Line(
        name=f"int4 {name} : bfloat16",
        ours=lambda: decode(int4()),
        other=lambda: decode(plain()),
        wanted=1.8,
    )


def against_bound(name: str, int4: Callable[[], Path]) -> Line:
    """Return a line: the share of the read bound that one stream reaches, in turns with a sum."""

    def share() -> float:
        command = [sys.executable, "-m", "tests.benchmarks.quantise.read_share", str(int4())]
        done = subprocess.run(
            [*command, "--json"], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        return float(json.loads(done.stdout)["share"])

    return Line(name=f"int4 {name} : read bound", ours=share, other=lambda: 1.0, wanted=0.85)


def against_llama(
    name: str, file: Callable[[], Path], workload: Workload, *, wanted: float
) -> Line:
    """Return a line: a workload by remora and by llama.cpp."""
    figure = "decode_tok_s" if workload.name == "decode" else "total_tok_s"
    sizes = ["--requests", workload.num_requests, "--input", workload.input_tokens]
    sizes += ["--output", workload.output_tokens]
    threads = os.cpu_count() or 1
    return Line(
        name=name,
        ours=lambda: offline(file(), workload.name, *sizes)[figure],
        other=lambda: measure(file(), workload, threads=threads, samples=1)[figure],
        wanted=wanted,
    )


def offline(model: Path | str, workload: str, *more: object) -> dict[str, float]:
    """Run `remora bench offline` in a process of its own; return its figures."""
    command = [str(Path(sys.executable).with_name("remora")), "bench", "offline", str(model)]
    command += ["--workload", workload, "--repeats", "1", "--json", "-", *map(str, more)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    figures: dict[str, float] = json.loads(done.stdout)["figures"][workload]
    return figures


def decode(model: Path | str, *more: object) -> float:
    """Return tokens per second of one stream."""
    return offline(model, "decode", *more)["decode_tok_s"]


def decode_after(num_tokens: int, kv_dtype: str, num_streams: int, *more: object) -> float:
    """Return tokens per second of SmolLM2's steps after prompts of so many tokens."""
    sizes = ("--requests", num_streams, "--input", num_tokens, "--output", LONG_REPLY)
    held = ("--set", f"engine.kv_dtype={kv_dtype}")
    workload = "decode" if num_streams == 1 else "batch"
    figures = offline(SMOLLM2, workload, *sizes, *held, *more)
    return num_streams * 1e3 / figures["step_ms"]


def smollm2(folder: Path, kind: str) -> Path:
    """Return the packaged model in another format."""
    file = folder / f"smollm2-{kind.lower()}.gguf"
    if not file.exists():
        source = find_packaged_gguf(PACKAGE, INSTALL)
        tool = str(llama_tool("llama-quantize"))
        run(tool, "--allow-requantize", source, file, kind)
    return file


def k_quants(folder: Path, shape: str) -> Path:
    """Return a random model whose weights are Q4_K and Q6_K."""
    file = folder / f"random-{shape}-q4_k_m.gguf"
    if not file.exists():
        run(sys.executable, "-m", "tests.benchmarks.peers.random_gguf", file, "--shape", shape)
    kinds = {tensor.tensor_type for tensor in gguf.GGUFReader(file).tensors}
    assert {gguf.GGMLQuantizationType.Q4_K, gguf.GGMLQuantizationType.Q6_K} <= kinds, kinds
    return file


def folder_of(folder: Path, name: str, kind: str, model: Mapping[str, Any]) -> Path:
    """Return a random model of Qwen3's shape, its head the embedding."""
    path = folder / f"{kind.split(',')[0]}-{name.replace(' ', '').lower()}"
    if not (path / "model.safetensors").exists():
        path.mkdir(parents=True, exist_ok=True)
        write(path, Case(name=kind, tied=True, model=model), LAYERS)
    return path


def run(*command: object) -> None:
    """Run a program that writes a model; its output goes to standard error."""
    subprocess.run([str(part) for part in command], check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
