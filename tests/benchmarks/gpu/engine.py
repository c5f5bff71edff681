"""The engine on a GPU: its steps against what the device can do, and a run against transformers'.

    python tests/benchmarks/gpu/engine.py [--model llama-3.1-8b] [--json PATH] [--tiny]
        [--without-transformers]

Weights are random and made on the device. Of a decode step the bound is reading weights and KV once
at the speed of a copy; of a prompt, its multiplications at the speed of a large product. The gap is
what a step of the whole engine takes beyond the same step launched back to back. Transformers runs
the same prompts with continuous batching, in the same process, afterwards. `--tiny` runs everything
small on a CPU, where the figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from remora.configs.load import parse_args
from remora.configs.plan import EnginePlan, kv_bytes_per_token, make_plan, refit
from remora.engine import device as gpu
from remora.engine.choosing import Choosing
from remora.engine.device_memory import CudaMeter
from remora.engine.engine import Engine
from remora.engine.graphs.device_forward import DeviceForward
from remora.engine.graphs.recording import CudaRecorder
from remora.engine.inputs import RowTable, StepInputs
from remora.engine.launch import read_machine
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.facts import read_model_facts
from remora.engine.models.registry import load_model
from remora.engine.runner import LocalRunner
from remora.engine.sampling import Sampler
from remora.engine.types import Request, SamplingParams
from tests.benchmarks.gpu.bounds import Bounds, measure_bounds
from tests.benchmarks.gpu.shapes import BY_NAME

PAGE, MAX_ROWS, STEPS = 16, 256, 30
DECODES = ((1, 1024), (1, 8192), (8, 1024), (8, 8192), (64, 1024), (64, 8192), (256, 1024))
PROMPTS = (512, 4096, 16384)
RUN_ROWS, RUN_PROMPT, RUN_OUTPUT = 64, 1024, 128
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Found:
    """One measurement.

    share:  of the bound; None where there is none
    """

    model: str
    what: str
    value: float
    unit: str
    share: float | None = None

    def line(self) -> str:
        share = "" if self.share is None else f"{self.share:7.1%}"
        return f"{self.model:14} {self.what:34} {self.value:12.3f} {self.unit:9} {share}"


@dataclass(slots=True)
class Built:
    """An engine's parts, and a table of rows for each engine that is made of them."""

    plan: EnginePlan
    model: DecoderModel
    forward: DeviceForward
    choosing: Choosing
    weight_bytes: int
    kv_bytes: int
    num_parameters: int

    def engine(self) -> Engine:
        rows = self.plan.max_running_requests
        table = RowTable(max_rows=rows, max_tokens=self.plan.max_sequence_tokens, page_size=PAGE)
        sampler = Sampler(
            max_rows=rows,
            vocab_size=self.model.vocab_size,
            eos_token_ids=(),
            choosing=self.choosing,
        )
        runner = LocalRunner(self.forward, sampler, table, newest=self.forward)
        return Engine(
            self.plan,
            runner,
            eos_token_ids=(),
            vocab_size=self.model.vocab_size,
            overlapping=runner if self.plan.on_device.overlap else None,
        )


def measure_engine(name: str, bounds: Bounds, *, tiny: bool, peer: bool) -> Iterator[Found]:
    """Build a model's engine and measure it; then transformers', if wanted."""
    with checkpoint(BY_NAME[name]) as path:
        built = build(path, tiny=tiny)
        longest = built.plan.max_step_tokens
        room = built.plan.kv_tokens
        for rows, context in DECODES if not tiny else ((1, 64), (4, 64)):
            if rows <= built.plan.max_running_requests and rows * (context + STEPS) <= room:
                yield decode(name, built, rows, context, bounds)
        for num_tokens in PROMPTS if not tiny else (64,):
            if num_tokens <= longest:
                yield prefill(name, built, num_tokens, bounds)
        rows, prompt, output = (3, 32, 6) if tiny else (RUN_ROWS, RUN_PROMPT, RUN_OUTPUT)
        ours: list[Found] = []
        for found in run(name, built, rows, prompt, output):
            ours.append(found)
            yield found
        if not peer:
            return
        vocab_size = built.model.vocab_size
        built.forward.close()
        del built
        gc.collect()
        if not tiny:
            torch.cuda.empty_cache()
        theirs = transformers_rate(path, rows, prompt, output, vocab_size, tiny=tiny)
        yield Found(name, "transformers, same run", theirs, "tokens/s")
        yield Found(name, "engine / transformers", ours[0].value / theirs, "times")


@contextmanager
def checkpoint(config: dict[str, Any]) -> Iterator[Path]:
    """Write a folder with a config, and no weights."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        yield Path(folder)


def build(path: Path, *, tiny: bool) -> Built:
    """Do what a start-up does, without a tokenizer."""
    engine: dict[str, Any] = {
        "max_running_requests": MAX_ROWS,
        "max_step_tokens": 16384,
        "prefill_chunk_tokens": 16384,
    }
    if tiny:
        engine = {"kv_tokens": 4096, "max_running_requests": 4, "device": "cpu"}
    config = parse_args(
        {
            "model": {"path": str(path), "load_format": "dummy"},
            "engine": {**engine, "page_size": PAGE},
        }
    )
    facts = read_model_facts(path)
    plan = make_plan(config, facts, read_machine(config), path)
    model = load_model(
        path,
        dtype=DTYPES[plan.dtype],
        load_format="dummy",
        device=plan.device,
        show_progress=False,
    )
    if not tiny:
        meter = CudaMeter()
        step_bytes = gpu.measure(model, plan, meter)
        plan = refit(
            plan,
            config,
            facts,
            free_bytes=meter.free_bytes(),
            total_bytes=torch.cuda.mem_get_info()[1],
            step_bytes=step_bytes,
        )
    forward = gpu.make_forward(model, plan, plan.num_pages)
    if plan.on_device.graph_sizes:
        started = time.perf_counter()
        gpu.record(forward, plan, CudaRecorder(), show_progress=False)
        sys.stderr.write(f"recorded in {time.perf_counter() - started:.1f} s\n")
    weight_bytes = sum(shard.memory.nbytes for shard in model.tensors().values())
    if not model.head.tied:
        weight_bytes -= model.embedding.weight.nbytes
    return Built(
        plan=plan,
        model=model,
        forward=forward,
        choosing=gpu.make_choosing(plan),
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes_per_token(facts, plan.dtype),
        num_parameters=weight_bytes // model.dtype.itemsize,
    )


def step_inputs(rows: int, first: int, count: int, *, grown: bool) -> StepInputs:
    """Return a step of `count` tokens in each row, which has `first` before; pages row by row."""
    pages = -(-(first + count) // PAGE)
    widest = -(-(first + count + STEPS) // PAGE)
    tables = 1 + np.arange(rows * widest, dtype=np.int32).reshape(rows, widest)
    positions = np.tile(np.arange(first, first + count), rows)
    token_rows = np.repeat(np.arange(rows), count)
    starts = np.arange(rows + 1, dtype=np.int64) * count
    lines, columns = np.divmod(np.arange(rows * widest), widest)
    new = np.stack([lines, columns, tables.ravel()]).astype(np.int32)
    assert pages <= widest
    return StepInputs(
        token_ids=np.random.default_rng(0).integers(0, 500, rows * count),
        positions=positions,
        slots=tables[token_rows, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE,
        starts=starts,
        lengths=np.full(rows, first + count, dtype=np.int64),
        rows=np.arange(rows, dtype=np.int64),
        tables=tables,
        num_decodes=rows if count == 1 else 0,
        logit_index=starts[1:] - 1,
        adapters=np.zeros(rows * count, dtype=np.int32),
        grown=new if grown else new[:, :0],
    )


def decode(name: str, built: Built, rows: int, context: int, bounds: Bounds) -> Found:
    """Time decode steps launched back to back, tokens chosen in each."""
    steps = [step_inputs(rows, context + at, 1, grown=at == 0) for at in range(STEPS)]
    seconds = launched(built, steps)
    num_bytes = built.weight_bytes + rows * (context + STEPS / 2) * built.kv_bytes
    bound_s = num_bytes / bounds.bytes_per_s
    what = f"decode {rows} x {context}"
    return Found(name, what, seconds * 1e3, "ms/step", bound_s / seconds)


def launched(built: Built, steps: list[StepInputs]) -> float:
    """Return the seconds of one of the steps, of which the first three do not count."""
    is_cuda = built.plan.device == "cuda"
    before = []
    started = 0.0
    for at, inputs in enumerate(steps):
        if at == 3 or len(steps) <= 3:
            if is_cuda:
                torch.cuda.synchronize()
            started = time.perf_counter()
        chosen = built.choosing.choose(built.forward.forward(inputs), None)
        built.forward.take_newest(inputs.rows.astype(np.int32), chosen.token_ids)
        before.append(chosen)
        if at > 0:
            before[at - 1].take()
    before[-1].take()
    if is_cuda:
        torch.cuda.synchronize()
    counted = len(steps) - 3 if len(steps) > 3 else 1
    return (time.perf_counter() - started) / counted


def prefill(name: str, built: Built, num_tokens: int, bounds: Bounds) -> Found:
    """Time a prompt computed in one step."""
    seconds = statistics.median(
        launched(built, [step_inputs(1, 0, num_tokens, grown=True)]) for _ in range(4)
    )
    config = built.model.config
    attention = 2 * 2 * num_tokens**2 / 2 * config.num_heads * config.head_dim * config.num_layers
    head = config.vocab_size * config.hidden_size
    flops = 2 * (built.num_parameters - head) * num_tokens + attention
    bound_s = flops / bounds.flops_per_s
    return Found(name, f"prefill {num_tokens}", seconds * 1e3, "ms", bound_s / seconds)


def run(name: str, built: Built, rows: int, prompt: int, output: int) -> Iterator[Found]:
    """Let the engine answer `rows` prompts at once, greedily."""
    engine = built.engine()
    numbers = np.random.default_rng(1)

    def answer(tag: str, num_output: int) -> tuple[float, list[float]]:
        params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        prompts = numbers.integers(0, 500, (rows, prompt))
        for number, ids in enumerate(prompts):
            engine.add(
                Request(request_id=f"{tag}{number}", prompt_ids=ids.tolist(), sampling=params)
            )
        times, decode_s = [], []
        started = last = time.perf_counter()
        while engine.has_work:
            outputs = engine.step()
            now = time.perf_counter()
            times.append(now - last)
            if len(outputs) == rows:
                decode_s.append(now - last)
            last = now
        return last - started, decode_s

    answer("warm", 8)
    seconds, decode_s = answer("run", output)
    yield Found(name, f"engine {rows} x {prompt}+{output}", rows * output / seconds, "tokens/s")
    if len(decode_s) > 3:
        step_s = statistics.median(decode_s[2:])
        steps = [step_inputs(rows, prompt + at, 1, grown=at == 0) for at in range(STEPS)]
        alone_s = launched(built, steps)
        yield Found(name, f"engine's step at {rows} rows", step_s * 1e3, "ms")
        yield Found(
            name, "gap beside the step alone", (step_s - alone_s) * 1e3, "ms", 1 - alone_s / step_s
        )


def transformers_rate(
    path: Path, rows: int, prompt: int, output: int, vocab_size: int, *, tiny: bool
) -> float:
    """Return the tokens a second of transformers' continuous batching with the same work."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    device = "cpu" if tiny else "cuda"
    config = AutoConfig.from_pretrained(path)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=DTYPES[BY_NAME["tiny"]["torch_dtype"]] if tiny else torch.bfloat16,
            attn_implementation="sdpa",
        ).eval()
    prompts = np.random.default_rng(1).integers(0, min(500, vocab_size), (rows, prompt)).tolist()

    def answer(num_output: int) -> float:
        # -1 is no token's id: nothing ends an answer before its length does.
        generation = GenerationConfig(
            max_new_tokens=num_output, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        started = time.perf_counter()
        outputs = model.generate_batch(
            prompts, generation_config=generation, max_new_tokens=num_output
        )
        seconds = time.perf_counter() - started
        lengths = {len(each.generated_tokens) for each in outputs.values()}
        if lengths != {num_output}:
            raise RuntimeError(f"transformers made answers of {sorted(lengths)} tokens")
        return seconds

    answer(4)
    return rows * output / answer(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=list(BY_NAME), action="append")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--without-transformers", action="store_true")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        sys.exit("There is no GPU; --tiny runs everything small on a CPU.")
    bounds = measure_bounds(torch.device("cpu" if options.tiny else "cuda"))
    names = ["tiny"] if options.tiny else options.model or ["qwen3-0.6b", "llama-3.1-8b"]
    every = []
    for name in names:
        peer = not options.without_transformers
        for found in measure_engine(name, bounds, tiny=options.tiny, peer=peer):
            every.append(asdict(found))
            sys.stdout.write(found.line() + "\n")
            sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps({"bounds": asdict(bounds), "found": every}, indent=1))


if __name__ == "__main__":
    main()
