"""Measure the anonymous memory of loading quantised checkpoints for native products.

    python tests/benchmarks/quantise/loading.py [--only int4] [--layers 28]

Writes random models in several formats, of Qwen3-0.6B's shape and with experts, builds each one's
step program in a fresh process as the engine does, and prints a row for each. A thread samples
RssAnon: growth is its peak less what it was before. Mapped files are not anonymous. KV memory is a
few pages. Models that are rounded on loading are built twice, the second time from packed weights
on disk.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[3]))  # run as a script, not by pytest

from remora.configs.environment import cache_dir
from remora.configs.facts import MachineFacts
from remora.configs.load import parse_args
from remora.configs.machine import read_machine_facts
from remora.configs.planning.plan import make_plan
from remora.engine.models.checkpoint import read_config
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.facts import read_model_facts
from remora.engine.models.load import open_model
from remora.engine.runner.forward import build_forward
from remora.engine.runner.inputs import InputBatch
from remora.engine.weights.loader import whole_shapes
from remora.engine.weights.packed_cache import PackedCache
from remora.kernels.memory import Arena
from tests.benchmarks.host.anonymous_memory import watched

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 1024, 3072, 16, 8, 128, 151_936
MODEL: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
EXPERTS: Mapping[str, Any] = {
    **MODEL,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GPT_OSS: Mapping[str, Any] = {
    **MODEL,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": 1024,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
}
SLACK, FACTOR = 300e6, 1.2  # allowed on top of the weights, and times them
MB = 1e6
BFLOAT16, MXFP4 = "bfloat16", "mxfp4"
PLAIN = ("embed_tokens.weight", "mlp.gate.weight")  # endings of tensors that are not quantised
Write = Callable[[str, tuple[int, ...]], dict[str, Tensor]]


def int4(name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Write codes packed by compressed-tensors, in groups of 128."""
    outputs, inputs = shape
    module = name.removesuffix(".weight")
    return {
        f"{module}.weight_packed": torch.randint(-(2**31), 2**31, (outputs, inputs // 8)).int(),
        f"{module}.weight_scale": torch.rand(outputs, inputs // 128).bfloat16() * 0.01 + 0.001,
        f"{module}.weight_shape": torch.tensor(shape),
    }


def float8(name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Write blocks of 128 x 128."""
    outputs, inputs = shape
    scales = torch.rand(-(-outputs // 128), -(-inputs // 128)) * 0.01 + 0.001
    return {name: torch.randn(shape).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
SETTINGS: Mapping[str, tuple[Mapping[str, Any], Write]] = {
    "int4, groups of 128": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4}},
        },
        int4,
    ),
    "float8 in blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, float8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model to load.

    name:          of its format, in SETTINGS or of GGUF
    model:         entries of config.json
    layers:        how many it has; None = as the command line says
    quantization:  to which it is rounded on loading
    """

    name: str
    tied: bool
    model: Mapping[str, Any] = field(default_factory=lambda: MODEL)
    layers: int | None = None
    quantization: str = "none"

    def __str__(self) -> str:
        """Name it in a table."""
        kind = "" if self.model is MODEL else f" ({self.model['model_type']})"
        return f"{self.name}{kind}"


DENSE = (*SETTINGS, "Q4_0", "Q8_0")
CASES = (
    *(Case(name=name, tied=tied) for name in DENSE for tied in (True, False)),
    *(Case(name=BFLOAT16, tied=tied, quantization="int4") for tied in (True, False)),
    Case(name=BFLOAT16, tied=False, model=EXPERTS, layers=8, quantization="int4"),
    Case(name="int4, groups of 128", tied=False, model=EXPERTS, layers=8),
    Case(name=MXFP4, tied=False, model=GPT_OSS, layers=8),
)


def main() -> None:
    """Measure every case and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--only", default="", help="of the formats those whose name has this")
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--quantization", default="none", help=argparse.SUPPRESS)
    parser.add_argument("--packed", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        sys.stdout.write(json.dumps(load(options.load, options.quantization, options.packed)))
        return
    lines = [
        "| weights of layers | head | file MB | held MB | growth MB | allowed MB | growth / held |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for case in (case for case in CASES if options.only in str(case)):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as packed:
            path = write(Path(folder), case, case.layers or options.layers)
            size = sum(file.stat().st_size for file in Path(folder).iterdir())
            starts = [""] if case.quantization == "none" else [" as int4", " as int4, kept"]
            for start in starts:
                held, growth = measured(path, case.quantization, packed)
                head = "the embedding" if case.tied else "its own"
                lines.append(
                    f"| {case}{start} | {head} | {size / MB:.0f} | {held / MB:.0f} | "
                    f"{growth / MB:.0f} | {(FACTOR * held + SLACK) / MB:.0f} | "
                    f"{growth / held:.3f} |"
                )
                sys.stderr.write(lines[-1] + "\n")
    sys.stdout.write("\n".join(lines) + "\n")


def measured(path: Path, quantization: str, packed: str) -> tuple[int, int]:
    """Load in a fresh process; return bytes of the weights as held, and growth."""
    command = [sys.executable, __file__, "--load", str(path)]
    command += ["--quantization", quantization, "--packed", packed]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    held, growth = json.loads(done.stdout)
    return held, growth


def write(folder: Path, case: Case, num_layers: int) -> Path:
    """Write a random model; return its path."""
    config = {**case.model, "num_hidden_layers": num_layers, "tie_word_embeddings": case.tied}
    (folder / "config.json").write_text(json.dumps(config))
    model = DecoderModel(read_config(folder), dtype=torch.bfloat16, device="meta")
    shapes = whole_shapes(model.tensors())
    tensors: dict[str, Tensor] = {}
    if case.name == MXFP4:
        config["quantization_config"] = {"quant_method": "mxfp4"}
        tensors = gpt_oss(config, shapes)
    elif case.name == BFLOAT16:
        tensors = {tensor: values(shape) for tensor, shape in shapes.items()}
    elif case.name in SETTINGS:
        config["quantization_config"], quantised = SETTINGS[case.name]
        for tensor, shape in shapes.items():
            is_plain = len(shape) < 2 or tensor.endswith(PLAIN)
            tensors |= {tensor: values(shape)} if is_plain else quantised(tensor, shape)
    else:
        return write_gguf(folder / "model.gguf", case.name, shapes, num_layers)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def gpt_oss(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Write the tensors of GPT-OSS: those of all experts of a layer are one, in MXFP4."""
    number, size, inner = config["num_local_experts"], HIDDEN, config["intermediate_size"]
    tensors = {
        name.replace(".mlp.gate.", ".mlp.router."): values(shape)
        for name, shape in shapes.items()
        if ".experts." not in name
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts."
        for name, outputs, inputs in (
            ("gate_up_proj", 2 * inner, size),
            ("down_proj", size, inner),
        ):
            blocks = torch.randint(0, 256, (number, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 124, (number, outputs, inputs // 32), dtype=torch.uint8)
            tensors[f"{prefix}{name}_blocks"], tensors[f"{prefix}{name}_scales"] = blocks, scales
            tensors[f"{prefix}{name}_bias"] = values((number, outputs))
    return tensors


def values(shape: tuple[int, ...]) -> Tensor:
    """Return random numbers; rows repeat, which no reader minds."""
    some = torch.randn(min(shape[0], 256), *shape[1:]).mul_(0.02).bfloat16()
    times = [-(-shape[0] // len(some))] + [1] * (len(shape) - 1)
    return some.repeat(times)[: shape[0]].contiguous()


def write_gguf(
    file: Path, kind: str, shapes: Mapping[str, tuple[int, ...]], num_layers: int
) -> Path:
    """Write a GGUF file, the embedding in the same type; norms are float32."""
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_block_count(num_layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, num_layers)
    for name, shape in shapes.items():
        stored = gguf.GGMLQuantizationType[kind if len(shape) == 2 else "F32"]
        some = values((min(shape[0], 256), *shape[1:])).float().numpy()
        rows = torch.from_numpy(gguf.quantize(some, stored))
        times = [-(-shape[0] // len(rows))] + [1] * (len(shape) - 1)
        data = rows.repeat(times)[: shape[0]].contiguous().numpy()
        short = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(short, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def load(path: Path, quantization: str, packed: Path) -> tuple[int, int]:
    """Build the step program; return the bytes of weights as held, and the growth of RssAnon.

    packed:  folder of packed weights
    """
    machine = MachineFacts(
        num_cores=2,
        total_bytes=2**40,
        available_bytes=2**40,
        cpu_name="any",
        cpu_features=read_machine_facts().cpu_features,
        devices=("cpu",),
    )
    engine = {"kv_tokens": 256, "cpu_kernels": "native", "max_running_requests": 1}
    section = {"path": str(path), "quantization": quantization}
    config = parse_args({"model": section, "engine": {**engine, "max_step_tokens": 64}})
    cache = PackedCache.of(path, "auto", "", root=packed, limit_bytes=2**40)
    plan = make_plan(config, read_model_facts(path), machine, path)
    table = InputBatch(max_rows=1, max_tokens=plan.max_sequence_tokens, page_size=plan.page_size)
    taken = count_packed()
    with (
        watched() as peak,
        open_model(
            path, dtype=torch.bfloat16, load_format="auto", device="cpu", show_progress=False
        ) as (model, fill),
    ):
        built = build_forward(model, plan, table, cache_dir() / "kernels", fill=fill, packed=cache)
        held = sum(taken) + model.embedding.weight.nbytes
    built.forward.close()
    return held, peak.growth


def count_packed() -> list[int]:
    """Return a list to which the bytes of each weight are added that is packed from now on."""
    taken: list[int] = []
    take = Arena.take

    def count(arena: Arena, num_bytes: int) -> Tensor:
        taken.append(num_bytes)
        return take(arena, num_bytes)

    Arena.take = count  # type: ignore[method-assign, assignment]
    return taken


if __name__ == "__main__":
    main()
