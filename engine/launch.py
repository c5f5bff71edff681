"""From a configuration to a running engine: resolve, plan, load, allocate.

The one place where config, weights, attention, sampler and runner are joined. Each phase is timed,
so that start-up can be explained. Knows no Ray and no HTTP.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from remora.configs.environment import cache_dir
from remora.configs.machine import read_machine_facts
from remora.configs.plan import EnginePlan, MachineFacts, ModelFacts, make_plan
from remora.configs.schema import ServeConfig
from remora.engine.client import LocalEngineClient
from remora.engine.engine import Engine
from remora.engine.forward import DTYPES, build_forward
from remora.engine.inputs import RowTable
from remora.engine.models.facts import read_model_facts
from remora.engine.models.registry import load_model
from remora.engine.runner import LocalRunner
from remora.engine.sampling import Sampler
from remora.engine.tokens.generation_config import read_generation_defaults
from remora.engine.tokens.spellings import Spellings
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.weights.source import resolve_model

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Phases:
    """Seconds that each phase of start-up took, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the block as phase `name`."""
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """An engine that is ready to step, and what was learned on the way.

    generation_defaults:  sampling values that the checkpoint recommends, by SamplingParams' names
    phases:               seconds per phase of start-up
    kernels:              what computes, in words
    step_weight_bytes:    bytes of weights that one step reads
    torch_threads:        threads that torch may use beside them
    """

    engine: Engine
    tokenizer: Tokenizer
    plan: EnginePlan
    facts: ModelFacts
    machine: MachineFacts
    generation_defaults: Mapping[str, float | int]
    phases: dict[str, float]
    kernels: str
    step_weight_bytes: int
    torch_threads: int


@dataclass(frozen=True, slots=True)
class LaunchedEngine:
    """A BuiltEngine running in its own thread, behind a client."""

    built: BuiltEngine
    client: LocalEngineClient


def build_engine(config: ServeConfig, *, show_progress: bool = True) -> BuiltEngine:
    """Load the model and allocate the KV memory. Raises ConfigError with what to change."""
    phases = Phases()
    with phases.timed("resolve model"):
        path = resolve_model(config.model.path, cache_dir())
        facts = read_model_facts(path)
        machine = _read_machine(config)
        plan = make_plan(config, facts, machine, path)
    torch.set_num_threads(plan.num_threads)
    with phases.timed("load tokenizer"):
        tokenizer = Tokenizer.load(path)
    with phases.timed("load weights"):
        model = load_model(
            path,
            dtype=DTYPES[plan.dtype],
            load_format=plan.load_format,
            device=plan.device,
            show_progress=show_progress,
        )
    table = RowTable(
        max_rows=plan.max_running_requests,
        max_tokens=plan.max_sequence_tokens,
        page_size=plan.page_size,
    )
    with phases.timed("prepare kernels and KV cache"):
        forward = build_forward(model, plan, table, cache_dir() / "kernels")
    torch.set_num_threads(forward.torch_threads)
    spellings = Spellings(tokenizer.vocab_size, tokenizer.token_bytes, tokenizer.special_ids)
    if config.grammar.token_healing:
        spellings.prepare()
    sampler = Sampler(
        max_rows=plan.max_running_requests,
        vocab_size=facts.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        kernels=forward.sampling,
        spellings=spellings,
    )
    runner = LocalRunner(forward.forward, sampler, table)
    return BuiltEngine(
        engine=Engine(
            plan, runner, eos_token_ids=tokenizer.eos_token_ids, vocab_size=facts.vocab_size
        ),
        tokenizer=tokenizer,
        plan=plan,
        facts=facts,
        machine=machine,
        generation_defaults=read_generation_defaults(path),
        phases=phases.seconds,
        kernels=forward.description,
        step_weight_bytes=forward.step_weight_bytes,
        torch_threads=forward.torch_threads,
    )


def start_engine(config: ServeConfig, *, show_progress: bool = True) -> LaunchedEngine:
    """Build the engine and start its thread. Call it on the event loop that will use the client."""
    built = build_engine(config, show_progress=show_progress)
    num_threads = built.torch_threads
    client = LocalEngineClient(
        built.engine,
        built.tokenizer,
        on_start=lambda: torch.set_num_threads(num_threads),  # per thread with OpenMP
    )
    return LaunchedEngine(built, client)


def _read_machine(config: ServeConfig) -> MachineFacts:
    """Ask this machine; the available memory is that of the device the model will run on."""
    gpus = tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))
    machine = read_machine_facts(devices=(*gpus, "cpu"))
    if not gpus or config.engine.device == "cpu":
        return machine
    free_bytes, _ = torch.cuda.mem_get_info()
    return replace(machine, available_bytes=free_bytes)
