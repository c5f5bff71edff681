"""A model of random weights as the engine runs it, without a tokenizer, and its steps alone."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from remora.configs.load import parse_args
from remora.configs.planning.kv_format import kv_bytes_per_token
from remora.configs.planning.plan import EnginePlan, make_plan, refit
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

PAGE, MAX_ROWS, STEPS = 16, 256, 30
MAX_STEP_TOKENS = 16384
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(slots=True)
class Built:
    """An engine's parts, and a table of rows for each engine that is made of them.

    seconds:  of the start-up, by phase
    """

    plan: EnginePlan
    model: DecoderModel
    forward: DeviceForward
    token_sampler: TokenSampler
    kv_bytes: int
    seconds: dict[str, float]

    def decode_bytes(self, rows: int, context: float) -> float:
        """Return what a decode step reads: weights, and the KV of so many tokens of each row."""
        return step_weight_bytes(self.model, rows) + rows * context * self.kv_bytes

    def prefill_flops(self, num_tokens: int) -> float:
        """Return the operations of a prompt that is computed in one step."""
        return model_work(self.model.config, dtype=self.plan.dtype).flops(num_tokens, 1)

    def engine(self) -> Engine:
        """Make an engine of the parts."""
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


@contextmanager
def checkpoint(config: dict[str, Any]) -> Iterator[Path]:
    """Write a folder with a config, and no weights."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        yield Path(folder)


def build(config: dict[str, Any], *, tiny: bool, captures: bool = True, **engine: Any) -> Built:
    """Do what a start-up does.

    engine:    options of the section, besides those of every run
    captures:  whether decode steps become graphs
    """
    with checkpoint(config) as path:
        return _build(path, tiny=tiny, captures=captures, engine=engine)


def _build(path: Path, *, tiny: bool, captures: bool, engine: dict[str, Any]) -> Built:
    sizes: dict[str, Any] = {
        "max_running_requests": MAX_ROWS,
        "max_step_tokens": MAX_STEP_TOKENS,
        "prefill_chunk_tokens": MAX_STEP_TOKENS,
    }
    if tiny:
        sizes = {"kv_tokens": 4096, "max_running_requests": 4, "device": "cpu"}
    parsed = parse_args(
        {
            "model": {"path": str(path), "load_format": "dummy"},
            "engine": {**sizes, "page_size": PAGE, **engine},
        }
    )
    facts = read_model_facts(path)
    plan = make_plan(parsed, facts, read_machine(parsed), path)
    seconds: dict[str, float] = {}
    with timed(seconds, "weights"):
        model = load_model(
            path,
            dtype=DTYPES[plan.dtype],
            load_format="dummy",
            device=plan.device,
            show_progress=False,
        )
    if not tiny:
        meter = CudaMeter()
        with timed(seconds, "measure"):
            step_bytes = gpu.measure(model, plan, meter)
        plan = refit(
            plan,
            parsed,
            facts,
            free_bytes=meter.free_bytes(),
            total_bytes=torch.cuda.mem_get_info()[1],
            step_bytes=step_bytes,
        )
    forward = gpu.make_forward(model, plan, plan.num_pages)
    token_sampler = gpu.make_token_sampler(plan, forward)
    if not tiny:  # a CPU compiles nothing
        with timed(seconds, "warm up"):
            gpu.warm_up(forward, plan)
            gpu.warm_up_sampling(token_sampler, model.vocab_size, torch.device(plan.device))
    if plan.on_device.graph_sizes and captures:
        with timed(seconds, "capture"):
            gpu.capture(forward, plan, CudaGraphRunner(), show_progress=False)
    return Built(
        plan=plan,
        model=model,
        forward=forward,
        token_sampler=token_sampler,
        kv_bytes=kv_bytes_per_token(facts, plan.dtype),
        seconds=seconds,
    )


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Keep the seconds of a block."""
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started


def step_inputs(rows: int, first: int, count: int, *, grown: bool) -> StepInputs:
    """Return a step of `count` tokens in each row, which has `first` before; pages row by row."""
    widest = -(-(first + count + STEPS) // PAGE)
    tables = 1 + np.arange(rows * widest, dtype=np.int32).reshape(rows, widest)
    positions = np.tile(np.arange(first, first + count), rows)
    token_rows = np.repeat(np.arange(rows), count)
    starts = np.arange(rows + 1, dtype=np.int64) * count
    lines, columns = np.divmod(np.arange(rows * widest), widest)
    pages_of_rows = tables.ravel()
    no_windows = np.zeros_like(pages_of_rows)
    new = np.stack([lines, columns, pages_of_rows, no_windows]).astype(np.int32)
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


def decode_steps(rows: int, context: int, count: int = STEPS) -> list[StepInputs]:
    """Return steps of one token in each row, one after the other."""
    return [step_inputs(rows, context + at, 1, grown=at == 0) for at in range(count)]


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
        built.token_sampler.prepare(None, is_plain=True)
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


@dataclass(frozen=True, slots=True)
class Answered:
    """A run of the engine: its seconds, those of each step, and tokens that were made."""

    seconds: float
    step_s: list[float]
    decode_s: list[float]
    num_tokens: int


def answer(engine: Engine, tag: str, prompts: list[list[int]], lengths: list[int]) -> Answered:
    """Answer prompts, greedily, with answers of given lengths, all asked at once.

    Steps in which every prompt got a token are `decode_s`.
    """
    for number, (ids, length) in enumerate(zip(prompts, lengths, strict=True)):
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        engine.add(Request(request_id=f"{tag}{number}", prompt_ids=ids, sampling=params))
    step_s, decode_s, num_tokens = [], [], 0
    started = last = time.perf_counter()
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        num_tokens += sum(len(output.token_ids) for output in outputs)
        step_s.append(now - last)
        if len(outputs) == len(prompts):
            decode_s.append(now - last)
        last = now
    return Answered(last - started, step_s, decode_s, num_tokens)
