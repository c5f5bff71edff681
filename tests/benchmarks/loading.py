"""Measure the speed of loading weights and its peak memory.

    python tests/benchmarks/loading.py [--gigabytes 1.5] [--markdown FILE]

Writes a random model in several formats, loads each in a fresh process, and prints a row for each:
speed with the files out of the page cache and in it, compared with plain reading of the same
files; and the peak memory of the process, Python and torch included, as a multiple of the weights;
growth is that over what it had before.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, not by pytest

from remora.configs.environment import cache_dir
from remora.configs.facts import MachineFacts
from remora.configs.load import parse_args
from remora.configs.machine import read_machine_facts
from remora.configs.planning.loading import Loading
from remora.configs.planning.plan import make_plan
from remora.engine.models.checkpoint import read_config
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.facts import read_model_facts
from remora.engine.models.load import open_model
from remora.engine.parallel.layout import Layout
from remora.engine.protocols import Fill
from remora.engine.runner.forward import build_forward
from remora.engine.runner.inputs import InputBatch
from remora.engine.weights.files import weight_files
from remora.engine.weights.loader import whole_shapes

HIDDEN, INNER, VOCABULARY = 2048, 8192, 32_000
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
SHARD_BYTES = 600 * 10**6
READ_AT_ONCE = 8 * 2**20
MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to load.

    model:   folder or file below the temporary one
    kernels: what the forward pass is then built with; "" = it is not
    tp_size: of which rank 0's share is loaded
    """

    title: str
    model: str
    load_format: str = "auto"
    mmap: bool = True
    kernels: str = ""
    quantization: str = "none"
    tp_size: int = 1
    threads: int = 2  # as model.load_threads


CASES = (
    Case(title="safetensors, mapped", model="safetensors"),
    Case(title="safetensors, read whole", model="safetensors", mmap=False),
    Case(title="safetensors, 1 thread", model="safetensors", threads=1),
    Case(title="one rank of two", model="safetensors", tp_size=2),
    Case(title="packed for native kernels", model="safetensors", kernels="native"),
    Case(title="rounded to int8", model="safetensors", kernels="native", quantization="int8"),
    Case(title="packed by torch", model="safetensors", kernels="torch"),
    Case(title="PyTorch files", model="pt", load_format="pt"),
    Case(title="GGUF, BF16", model="bf16.gguf"),
    Case(title="GGUF, Q8_0", model="q8_0.gguf"),
    Case(title="GGUF, Q8_0, 1 thread", model="q8_0.gguf", threads=1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes and seconds of one load.

    weights:   of the model, or the share, as it is held while it is loaded
    at_start:  memory of the process before it
    peak:      most memory ever
    """

    seconds: float
    weights: int
    at_start: int
    peak: int


def main() -> None:
    """Measure every case and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--only", default="", help="of the cases those whose title has this")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        folder, case = json.loads(options.load)
        sys.stdout.write(json.dumps(asdict(load(Path(folder), Case(**case)))))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = measure_all(folder, options.gigabytes, options.only)
    sys.stdout.write(table)
    if options.markdown:
        options.markdown.write_text(table)


def measure_all(folder: Path, gigabytes: float, only: str) -> str:
    """Write the models, load each cold and warm, and return a table."""
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r});"
            f"import loading; loading.write_models(loading.Path({str(folder)!r}), {gigabytes})",
        ],
        check=True,
    )
    os.sync()
    lines = [
        "| | files MB | cold MB/s | reading | warm MB/s | reading | weights MB | peak MB "
        "| peak / weights | growth / weights |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case in (case for case in CASES if only in case.title):
        files = weight_files(folder / case.model, case.load_format)
        size = sum(file.stat().st_size for file in files) / MB
        drop(files)
        read_cold = read_plainly(files)
        drop(files)
        cold = run(folder, case)
        read_warm = read_plainly(files)
        warm = run(folder, case)
        peak = max(cold.peak, warm.peak)
        growth = max(one.peak - one.at_start for one in (cold, warm))
        lines.append(
            f"| {case.title} | {size:.0f} | {size / cold.seconds:.0f} | {size / read_cold:.0f} | "
            f"{size / warm.seconds:.0f} | {size / read_warm:.0f} | {warm.weights / MB:.0f} | "
            f"{peak / MB:.0f} | {peak / warm.weights:.3f} | {growth / warm.weights:.3f} |"
        )
        sys.stderr.write(lines[-1] + "\n")
    return "\n".join(lines) + "\n"


def write_models(folder: Path, gigabytes: float) -> None:
    """Write the model as safetensors, PyTorch files and GGUF; no more than a shard is in memory."""
    per_layer = 2 * HIDDEN * (HIDDEN + HIDDEN // 4 + HIDDEN // 4 + HIDDEN + 3 * INNER)
    num_layers = max(1, round((gigabytes * 1e9 - 4 * VOCABULARY * HIDDEN) / per_layer))
    config = {**MODEL, "num_hidden_layers": num_layers}
    for name in ("safetensors", "pt"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    model = DecoderModel(read_config(folder / "pt"), dtype=torch.bfloat16, device="meta")
    shapes = whole_shapes(model.tensors())
    for name, ending, save in (
        ("safetensors", "safetensors", save_file),
        ("pt", "bin", torch.save),
    ):
        single = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}[ending]
        places: dict[str, str] = {}
        for number, names in enumerate(shards(shapes)):
            file = f"part-{number}.{ending}"
            save({one: values_of(one, shapes[one]) for one in names}, folder / name / file)
            places |= dict.fromkeys(names, file)
        (folder / name / f"{single}.index.json").write_text(json.dumps({"weight_map": places}))
    write_gguf(folder / "bf16.gguf", "BF16", config, shapes)
    write_gguf(folder / "q8_0.gguf", "Q8_0", config, shapes)


def shards(shapes: dict[str, tuple[int, ...]]) -> list[list[str]]:
    """Divide tensors into files of about SHARD_BYTES."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        if size > SHARD_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += 2 * int(np.prod(shape))
    return parts


def values_of(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return random values; rows repeat, which no reader minds."""
    some = torch.randn(min(shape[0], 64), *shape[1:]).mul_(0.02).bfloat16()
    return some.repeat(-(-shape[0] // len(some)), *[1] * (len(shape) - 1))[: shape[0]].contiguous()


def write_gguf(
    file: Path, kind: str, config: dict[str, object], shapes: dict[str, tuple[int, ...]]
) -> None:
    """Write a GGUF file; norms are float32."""
    import gguf

    from remora.engine.weights.gguf.names import BLOCK_NAMES, TOP_NAMES

    names = {str(ours): name for name, ours in (TOP_NAMES | BLOCK_NAMES).items()}
    writer = gguf.GGUFWriter(file, "llama", use_temp_file=True)
    writer.add_block_count(int(str(config["num_hidden_layers"])))
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(16)
    writer.add_head_count_kv(4)
    for name, shape in shapes.items():
        stem, _, suffix = name.rpartition(".")
        layer, inner = "", stem
        if stem.startswith("model.layers."):
            _, _, number, inner = stem.split(".", 3)
            layer = f"blk.{number}."
        stored = gguf.GGMLQuantizationType[kind if len(shape) == 2 else "F32"]
        values = gguf.quantize(values_of(name, shape).float().numpy(), stored)
        writer.add_tensor(f"{layer}{names[inner]}.{suffix}", values, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run(folder: Path, case: Case) -> Measured:
    """Load in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--load", json.dumps([str(folder), asdict(case)])],
        check=True,
        stdout=subprocess.PIPE,
    )
    return Measured(**json.loads(done.stdout))


def load(folder: Path, case: Case) -> Measured:
    """Load in this process, which has done nothing else yet."""
    path = folder / case.model
    torch.set_num_threads(1)
    at_start = memory("VmRSS")
    started = time.perf_counter()
    with open_model(
        path,
        dtype=torch.bfloat16,
        load_format=case.load_format,
        device="cpu",
        show_progress=False,
        layout=Layout(rank=0, tp_size=case.tp_size),
        loading=Loading(mmap=case.mmap, num_threads=case.threads),
    ) as (model, fill):
        weights = sum(shard.memory.nbytes for shard in model.tensors().values())
        if case.kernels:
            build(model, fill, path, case)
    return Measured(
        seconds=time.perf_counter() - started,
        weights=weights,
        at_start=at_start,
        peak=memory("VmHWM"),
    )


def build(model: DecoderModel, fill: Fill, path: Path, case: Case) -> None:
    """Build the forward pass, which loads and packs the weights layer by layer."""
    machine = MachineFacts(
        num_cores=1,
        total_bytes=2**40,
        available_bytes=2**40,
        cpu_name="any",
        cpu_features=read_machine_facts().cpu_features,
        devices=("cpu",),
    )
    sections = {
        "model": {"path": str(path), "quantization": case.quantization},
        "engine": {
            "kv_tokens": 256,
            "cpu_kernels": case.kernels,
            "max_running_requests": 1,
            "max_step_tokens": 64,
        },
    }
    plan = make_plan(parse_args(sections), read_model_facts(path), machine, path)
    table = InputBatch(max_rows=1, max_tokens=plan.max_sequence_tokens, page_size=plan.page_size)
    forward = build_forward(model, plan, table, cache_dir() / "kernels", fill=fill)
    forward.forward.close()


def memory(entry: str) -> int:
    """Return bytes of this process: VmRSS now, VmHWM at most."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{entry}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this kernel does not tell {entry}")


def drop(files: Sequence[Path]) -> None:
    """Put files out of the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(files: Sequence[Path]) -> float:
    """Return the seconds that reading files into a small buffer takes."""
    buffer = bytearray(READ_AT_ONCE)
    started = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
