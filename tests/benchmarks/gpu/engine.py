"""The engine on a GPU: its steps against what the device can do, and a run against transformers'.

    python tests/benchmarks/gpu/engine.py --model llama-3.1-8b --whose engine|transformers
        --bounds BYTES_PER_S,FLOPS_PER_S [--first N]

Weights are random and made on the device. Of a decode step the bound is reading weights and KV once
at the speed of a copy, for experts those that so many rows choose on average; of a prompt, its
multiplications at the speed of a large product. The gap is what a step of the whole engine takes
beyond the same step launched back to back. Transformers answers prompts of the same lengths with
continuous batching, in a process of its own. A worker of `run.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from remora.configs.load import parse_args
from remora.configs.planning.plan import EnginePlan, kv_bytes_per_token, make_plan, refit
from remora.deployments.bench.roofline import model_work
from remora.engine.engine import Engine
from remora.engine.graphs.cuda_graphs import CudaGraphRunner
from remora.engine.graphs.device_forward import DeviceForward
from remora.engine.launch import read_machine
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.facts import read_model_facts
from remora.engine.models.load import load_model
from remora.engine.runner import device as gpu
from remora.engine.runner.device_memory import CudaMeter
from remora.engine.runner.forward import step_weight_bytes
from remora.engine.runner.inputs import InputBatch, StepInputs
from remora.engine.runner.runner import LocalRunner
from remora.engine.sampling.sampler import Sampler
from remora.engine.sampling.token_sampler import TokenSampler
from remora.engine.types import Request, SamplingParams
from tests.benchmarks.gpu import workers
from tests.benchmarks.gpu.bounds import Bounds
from tests.benchmarks.gpu.rows import RATE, Found
from tests.benchmarks.gpu.shapes import BY_NAME

PAGE, MAX_ROWS, STEPS = 16, 256, 30
DECODES = ((1, 1024), (1, 8192), (8, 1024), (8, 8192), (64, 1024), (64, 8192), (256, 1024))
PROMPTS = (512, 4096, 16384)
RUN, TINY_RUN = (64, 1024, 128), (3, 32, 6)  # prompts, and tokens of a prompt and of an answer
WHOSE = ("engine", "transformers")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Place:
    """One thing that is measured, which may come to several findings."""

    what: str
    measure: Callable[[], Iterator[Found]]


@dataclass(slots=True)
class Built:
    """An engine's parts, and a table of rows for each engine that is made of them."""

    plan: EnginePlan
    model: DecoderModel
    forward: DeviceForward
    token_sampler: TokenSampler
    kv_bytes: int

    def decode_bytes(self, rows: int, context: float) -> float:
        """Return what a decode step reads: weights, and the KV of so many tokens of each row."""
        return step_weight_bytes(self.model, rows) + rows * context * self.kv_bytes

    def prefill_flops(self, num_tokens: int) -> float:
        """Return the operations of a prompt that is computed in one step."""
        return model_work(self.model.config, dtype=self.plan.dtype).flops(num_tokens, 1)

    def engine(self) -> Engine:
        rows = self.plan.max_running_requests
        table = InputBatch(max_rows=rows, max_tokens=self.plan.max_sequence_tokens, page_size=PAGE)
        sampler = Sampler(
            max_rows=rows,
            vocab_size=self.model.vocab_size,
            eos_token_ids=(),
            token_sampler=self.token_sampler,
        )
        runner = LocalRunner(self.forward, sampler, table, device_tokens=self.forward)
        return Engine(
            self.plan,
            runner,
            eos_token_ids=(),
            vocab_size=self.model.vocab_size,
            overlap=self.plan.on_device.overlap,
        )


def places(name: str, whose: str, bounds: Bounds, *, tiny: bool) -> Iterator[Place]:
    """Load a model, and yield what is measured of it."""
    rows, prompt, output = TINY_RUN if tiny else RUN
    if whose == "transformers":
        measure = partial(transformers_rate, name, rows, prompt, output, tiny=tiny)
        yield Place("transformers' run", measure)
        return
    with checkpoint(BY_NAME[name]) as path:
        built = build(path, tiny=tiny)
    for num_rows, context in DECODES if not tiny else ((1, 64), (4, 64)):
        has_room = num_rows * (context + 2 * STEPS + PAGE) <= built.plan.kv_tokens
        if num_rows <= built.plan.max_running_requests and has_room:
            measure = partial(decode, name, built, num_rows, context, bounds)
            yield Place(f"decode {num_rows} x {context}", measure)
    for num_tokens in PROMPTS if not tiny else (64,):
        if num_tokens <= built.plan.max_step_tokens:
            yield Place(f"prefill {num_tokens}", partial(prefill, name, built, num_tokens, bounds))
    yield Place("engine's run", partial(run, name, built, rows, prompt, output))


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
        gpu.capture(forward, plan, CudaGraphRunner(), show_progress=False)
        sys.stderr.write(f"recorded in {time.perf_counter() - started:.1f} s\n")
    return Built(
        plan=plan,
        model=model,
        forward=forward,
        token_sampler=gpu.make_token_sampler(plan),
        kv_bytes=kv_bytes_per_token(facts, plan.dtype),
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
    pages_of_rows = tables.ravel()
    no_windows = np.zeros_like(pages_of_rows)
    new = np.stack([lines, columns, pages_of_rows, no_windows]).astype(np.int32)
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


def decode(name: str, built: Built, rows: int, context: int, bounds: Bounds) -> Iterator[Found]:
    """Time decode steps launched back to back, tokens chosen in each."""
    steps = [step_inputs(rows, context + at, 1, grown=at == 0) for at in range(STEPS)]
    seconds = launched(built, steps)
    bound_s = built.decode_bytes(rows, context + STEPS / 2) / bounds.bytes_per_s
    what = f"decode {rows} x {context}"
    yield Found(name, what, seconds * 1e3, "ms/step", bound_s / seconds)


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
        chosen = built.token_sampler.choose(built.forward.forward(inputs), None)
        built.forward.set_last_tokens(chosen.token_ids)
        before.append(chosen)
        if at > 0:
            before[at - 1].take()
    before[-1].take()
    if is_cuda:
        torch.cuda.synchronize()
    counted = len(steps) - 3 if len(steps) > 3 else 1
    return (time.perf_counter() - started) / counted


def prefill(name: str, built: Built, num_tokens: int, bounds: Bounds) -> Iterator[Found]:
    """Time a prompt computed in one step."""
    seconds = statistics.median(
        launched(built, [step_inputs(1, 0, num_tokens, grown=True)]) for _ in range(4)
    )
    bound_s = built.prefill_flops(num_tokens) / bounds.flops_per_s
    yield Found(name, f"prefill {num_tokens}", seconds * 1e3, "ms", bound_s / seconds)


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
    yield Found(name, f"engine {rows} x {prompt}+{output}", rows * output / seconds, RATE)
    if len(decode_s) > 3:
        step_s = statistics.median(decode_s[2:])
        middle = prompt + max(0, output - STEPS) // 2  # as many tokens before as on average
        steps = [step_inputs(rows, middle + at, 1, grown=at == 0) for at in range(STEPS)]
        alone_s = launched(built, steps)
        yield Found(name, f"engine's step at {rows} rows", step_s * 1e3, "ms")
        yield Found(
            name, "gap to the step alone", (step_s - alone_s) * 1e3, "ms", 1 - alone_s / step_s
        )


def transformers_rate(
    name: str, rows: int, prompt: int, output: int, *, tiny: bool
) -> Iterator[Found]:
    """Let transformers' continuous batching answer as many prompts, started and warm as ours is."""
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        ContinuousBatchingConfig,
        GenerationConfig,
    )

    with checkpoint(BY_NAME[name]) as path:
        config = AutoConfig.from_pretrained(path)
    with torch.device("cpu" if tiny else "cuda"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[BY_NAME[name]["torch_dtype"]], attn_implementation="sdpa"
        ).eval()
    numbers = np.random.default_rng(1)
    # -1 is no token's id: nothing ends an answer before its length does.
    generation = GenerationConfig(
        max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # Of a CPU's memory it would take most.
    room = {"num_blocks": 8, "max_batch_tokens": 256} if tiny else {}
    with model.continuous_batching_context_manager(
        generation_config=generation,
        continuous_batching_config=ContinuousBatchingConfig(**room),
        timeout=5,
    ) as manager:

        def answer(num_output: int) -> float:
            prompts = numbers.integers(0, 500, (rows, prompt)).tolist()
            started = time.perf_counter()
            manager.add_requests(inputs=prompts, max_new_tokens=num_output)
            lengths: list[int] = []
            while len(lengths) < rows:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    lengths.append(len(result.generated_tokens))
                elif not manager.is_running():
                    raise RuntimeError("transformers' thread has ended")
            if set(lengths) != {num_output}:
                raise RuntimeError(f"transformers made answers of {sorted(set(lengths))} tokens")
            return time.perf_counter() - started

        answer(4)
        attention = model.config._attn_implementation
        yield Found(name, f"transformers, {attention}", rows * output / answer(output), RATE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=list(BY_NAME), required=True)
    parser.add_argument("--whose", choices=WHOSE, required=True)
    parser.add_argument("--bounds", type=Bounds.parse, required=True)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    start = about = Found(options.model, f"start of {options.whose}")
    workers.begin(options.first, asdict(about))
    try:
        every = places(options.model, options.whose, options.bounds, tiny=False)
        for number, place in enumerate(every):
            if number >= options.first:
                about = Found(options.model, place.what)
                workers.begin(number, asdict(about))
                for found in place.measure():
                    workers.tell(asdict(found))
    except Exception as error:
        traceback.print_exc()
        workers.tell(asdict(replace(about, failure=f"FAILED: {type(error).__name__}: {error}")))
        # Memory may be held, or the GPU lost: another process goes on, if it can begin.
        sys.exit(0 if about is start else 1)


if __name__ == "__main__":
    main()
