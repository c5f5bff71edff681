"""How much memory each rank takes while it loads its share of a model and runs on it.

    python tests/benchmarks/ranks/memory.py

Writes a checkpoint of about 450 MB, starts ranks as processes on it, and prints for each what it
holds of the weights and by how much its anonymous memory grew at most: while loading, and in all,
a prompt and its KV cache included.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[3]))  # run as a script, not by pytest

from remora.configs.facts import MachineFacts
from remora.configs.load import parse_args
from remora.configs.planning.plan import EnginePlan, make_plan
from remora.deployments.free_ports import free_port
from remora.engine.models.checkpoint import read_config
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.facts import read_model_facts
from remora.engine.models.load import load_model
from remora.engine.parallel.connect import connect, listen
from remora.engine.parallel.layout import Layout
from remora.engine.runner.forward import build_forward
from remora.engine.runner.inputs import InputBatch
from remora.engine.types import RowInit, SamplingParams, StepPlan
from remora.engine.weights.dummy import DummyWeights
from remora.engine.weights.loader import whole_shapes
from tests.benchmarks.host.anonymous_memory import watched

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 10,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
LAYOUTS = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2))
KV_TOKENS, PROMPT_TOKENS = 2048, 64
HOST, TIMEOUT_S = "127.0.0.1", 300.0
MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes of one rank; growth is that of anonymous memory over what it was before loading."""

    rank: int
    share: int
    kv: int
    loading_growth: int
    growth: int


def main() -> None:
    """Measure every layout and print a table."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        total = write_checkpoint(path)
        write(f"checkpoint {total / MB:.0f} MB; all in MB\n")
        write("| ranks | rank | share of weights | peak while loading | share with KV | peak |\n")
        write("|---|---|---|---|---|---|\n")
        for tp_size, pp_size in LAYOUTS:
            for found in measure(path, tp_size, pp_size):
                both = found.share + found.kv
                write(
                    f"| TP {tp_size} x PP {pp_size} | {found.rank} | {found.share / MB:.0f} | "
                    f"{found.loading_growth / MB:.0f} | {both / MB:.0f} | "
                    f"{found.growth / MB:.0f} |\n"
                )


def write(text: str) -> None:
    """Write to standard output."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_checkpoint(folder: Path) -> int:
    """Write a random model into a folder; returns the bytes of its weights."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    model = DecoderModel(read_config(folder), dtype=torch.bfloat16, device="meta")
    shapes = whole_shapes(model.tensors())
    tensors = {name: values.bfloat16() for name, values in DummyWeights(shapes).read(shapes.keys())}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def measure(path: Path, tp_size: int, pp_size: int) -> list[Measured]:
    """Start the ranks of a layout, let them run a prompt, and return what each took."""
    port = free_port()
    context = multiprocessing.get_context("spawn")
    started = []
    for rank in range(tp_size * pp_size):
        layout = Layout(rank=rank, tp_size=tp_size, pp_size=pp_size)
        mine, theirs = context.Pipe()
        process = context.Process(target=run_rank, args=(path, layout, port, theirs))
        process.start()
        started.append((process, mine))
    results = [mine.recv() for _, mine in started]
    for process, _ in started:
        process.join()
    return results


def run_rank(path: Path, layout: Layout, port: int, answer: Connection) -> None:
    """Load a share, run a prompt with the other ranks, and answer with what it took."""
    torch.set_num_threads(1)
    with torch.inference_mode():  # what torch sets up on first use is no rank's share
        torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)
    plan = plan_of(path, layout)
    group = connect(
        layout,
        host=HOST,
        port=port,
        listener=listen(HOST, port) if layout.rank == 0 else None,
        device="cpu",
        timeout_s=TIMEOUT_S,
    )
    with watched() as peak:
        model = load_model(
            path,
            dtype=torch.bfloat16,
            load_format="auto",
            device="cpu",
            show_progress=False,
            layout=layout,
        )
        loading = peak.growth
        share = sum(shard.memory.nbytes for shard in model.tensors().values())
        table = InputBatch(max_rows=2, max_tokens=plan.max_sequence_tokens, page_size=16)
        forward = build_forward(model, plan, table, path, group).forward
        forward.forward(table.inputs(fill_table(table, plan)))
    forward.close()
    group.close()
    answer.send(
        Measured(
            rank=layout.rank,
            share=share,
            kv=plan.kv_bytes,
            loading_growth=loading,
            growth=peak.growth,
        )
    )


def plan_of(path: Path, layout: Layout) -> EnginePlan:
    """Return the plan of a replica with these ranks."""
    machine = MachineFacts(
        num_cores=1,
        total_bytes=2**40,
        available_bytes=2**40,
        cpu_name="any",
        cpu_features=(),
        devices=("cpu",),
    )
    sections = {
        "model": {"path": str(path)},
        "engine": {"kv_tokens": KV_TOKENS, "cpu_kernels": "torch"},
        "parallel": {"tp_size": layout.tp_size, "pp_size": layout.pp_size},
    }
    return make_plan(parse_args(sections), read_model_facts(path), machine, path)


def fill_table(table: InputBatch, plan: EnginePlan) -> StepPlan:
    """Start a row that takes every page, and return a step over its prompt."""
    init = RowInit(
        row=0,
        token_ids=np.arange(PROMPT_TOKENS),
        num_prompt_tokens=PROMPT_TOKENS,
        seed=0,
        sampling=SamplingParams(),
    )
    pages = np.arange(1, plan.num_pages + 1, dtype=np.int32)
    table.start(init)
    table.add_pages(np.zeros_like(pages), pages)
    return StepPlan(
        step_id=0,
        added=(init,),
        dropped=np.empty(0, np.int32),
        page_rows=np.zeros_like(pages),
        page_ids=pages,
        rows=np.zeros(1, np.int32),
        starts=np.zeros(1, np.int32),
        num_tokens=np.full(1, PROMPT_TOKENS, np.int32),
        samples=np.ones(1, np.bool_),
    )


if __name__ == "__main__":
    main()
