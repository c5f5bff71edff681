"""Builds a running engine from a configuration: resolve, plan, load, allocate; rank 0 and others.

Joins config, weights, attention, sampler and runner, and times each phase of start-up. Knows no Ray
and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from remora.configs.environment import cache_dir
from remora.configs.errors import ConfigError
from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.machine import read_machine_facts
from remora.configs.planning.draft_plan import plan_with_draft, refit_with_draft
from remora.configs.planning.loading import Loading
from remora.configs.planning.plan import EnginePlan
from remora.configs.schema import ServeConfig
from remora.configs.sections.pooling import Task
from remora.engine.client import LocalEngineClient
from remora.engine.engine import Engine
from remora.engine.fallback.model import FallbackModel
from remora.engine.live.build import live_weights
from remora.engine.live.rank import RankWeights
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.facts import read_model_facts
from remora.engine.models.kv_scales import with_kv_scales
from remora.engine.models.load import open_served_model, open_weights
from remora.engine.models.locate import locate_model
from remora.engine.observe.inspection import Inspection, inspect
from remora.engine.observe.tensor_dump import dump_tensors
from remora.engine.offload.blocks import check_host_memory, offload_as_planned
from remora.engine.parallel.follower import Follower
from remora.engine.parallel.followers import Followers
from remora.engine.parallel.group import Group
from remora.engine.parallel.layout import Layout
from remora.engine.parallel.numa import bind_rank
from remora.engine.parallel.rendezvous import Meeting, NoTeam, Team, join
from remora.engine.parallel.renewal import Renewal
from remora.engine.phases import Phases
from remora.engine.pooling.facts import pooling_task
from remora.engine.pooling.launch import BuiltPooling, build_pooling
from remora.engine.protocols import NO_ADAPTERS, AdapterPool, Adapting, Fill
from remora.engine.runner.device import measure
from remora.engine.runner.device_memory import CudaMeter, Meter
from remora.engine.runner.forward import DTYPES, BuiltForward, build_forward
from remora.engine.runner.inputs import InputBatch
from remora.engine.runner.runner import LocalRunner
from remora.engine.sampling.logit_processors import load_processors
from remora.engine.sampling.sampler import Sampler
from remora.engine.sampling.token_sampler import TokenSampler
from remora.engine.spec.build import build_drafter, build_speculation, read_draft_facts
from remora.engine.spec.target import Target
from remora.engine.thread import EngineThread
from remora.engine.tokens.configured import configured_tokenizer
from remora.engine.tokens.generation_config import read_generation_defaults
from remora.engine.tokens.token_text import Spellings
from remora.engine.tokens.tokenizer import Tokenizer
from remora.engine.weights.delete import delete_weights
from remora.engine.weights.packed_cache import FOLDER as PACKED
from remora.engine.weights.packed_cache import PackedCache
from remora.engine.weights.rename_tensors import RenamingRules
from remora.kernels.gpu.arch import converts_e4m3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """An engine that is ready to step, and facts from its start-up.

    generation_defaults:  sampling values that the checkpoint recommends, by SamplingParams' names
    phases:               seconds per phase of start-up
    kernels:              description of the forward pass
    step_weight_bytes:    bytes of weights that a step of one token reads
    torch_threads:        threads for torch
    followers:            the other ranks
    adapters:             this rank's adapter pool; None = no slots
    inspection:           watchers of the engine
    live:                 changes rank 0's weights and memory; None = not allowed
    renewal:              replaces the other ranks; None = there are none, or they cannot change
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
    followers: Followers
    adapters: AdapterPool | None
    inspection: Inspection
    live: RankWeights | None = None
    renewal: Renewal | None = None


@dataclass(frozen=True, slots=True)
class LaunchedEngine:
    """A BuiltEngine running in its own thread, behind a client."""

    built: BuiltEngine | BuiltPooling
    client: LocalEngineClient


def build_engine(
    config: ServeConfig,
    *,
    adapting: Adapting = NO_ADAPTERS,
    team: Team | None = None,
    show_progress: bool = True,
) -> BuiltEngine:
    """Load the model and allocate the KV memory. Raises ConfigError, which says what to change.

    adapting:  how the engine applies adapters
    team:      the other ranks, if the configuration has several
    """
    others = _check_kind(config, team)
    phases = Phases()
    with phases.timed("resolve model"):
        path = locate_model(config.model)
        facts = read_model_facts(path, Loading.of(config.model))
        machine = others.machine(read_machine(config), facts)
        plan = _plan(config, facts, machine, path, adapting)
    others.load(plan)
    with phases.timed("load tokenizer"):
        tokenizer = configured_tokenizer(config.model, path, vocab_size=facts.vocab_size)
    layout = Layout(rank=0, tp_size=plan.tp_size, pp_size=plan.pp_size)
    with ExitStack() as opened, ExitStack() as loading:
        with phases.timed("load weights"):
            model, fill = loading.enter_context(_open_share(plan, layout, adapting, show_progress))
            if plan.device != "cpu" or plan.num_ranks > 1:
                fill(None)  # on one CPU rank, each layer is loaded when it is packed
                offload_as_planned(model, plan)
            pool = _make_pool(plan, model, adapting)
        fill = phases.timing("load weights", fill)
        if plan.device == "cuda" and plan.num_ranks == 1:
            with phases.timed("measure memory"):
                plan = _fit(plan, config, facts, model, CudaMeter(), machine.total_bytes)
        with phases.timed("gather ranks"):
            followers, group = others.gather(layout, plan.device)
        opened.callback(group.close)
        opened.callback(followers.close)
        table = make_table(plan)
        with phases.timed("prepare kernels and KV cache"):
            _dump_as_configured(model, config)
            packed = _packed_cache(config, plan, facts, adapting)
            built = build_forward(
                model, plan, table, _kernels(), group, fill, packed, show_progress=show_progress
            )
            others.ready()
        _delete_as_configured(plan, config)
        torch.set_num_threads(built.torch_threads)
        with phases.timed("load draft model"):
            runner = _make_runner(
                config, plan, facts, tokenizer, built, table, followers, group, pool
            )
        opened.pop_all()  # the runner closes them from now on
    engine = _make_engine(plan, facts, tokenizer, runner)
    return BuiltEngine(
        engine=engine,
        tokenizer=tokenizer,
        plan=plan,
        facts=facts,
        machine=machine,
        generation_defaults=read_generation_defaults(path),
        phases=phases.seconds,
        kernels=built.description,
        step_weight_bytes=built.step_weight_bytes,
        torch_threads=built.torch_threads,
        followers=followers,
        adapters=pool,
        inspection=inspect(engine, config),
        live=live_weights(config, plan, table, runner, packed),
        renewal=Renewal.of(others, layout, facts, machine, runner, engine),
    )


async def start_engine(
    config: ServeConfig,
    *,
    adapting: Adapting = NO_ADAPTERS,
    team: Team | None = None,
    show_progress: bool = True,
) -> LaunchedEngine:
    """Build the engine and start its thread; the client is bound to the running event loop."""
    task = await asyncio.to_thread(task_of, config)
    if task is not None:
        return await _start_pooling(config, task, show_progress)
    with _building() as thread:
        built = await asyncio.wrap_future(
            thread.call(
                partial(
                    build_engine, config, adapting=adapting, team=team, show_progress=show_progress
                )
            )
        )
        num_threads = built.torch_threads
        client = LocalEngineClient(
            built.engine,
            built.tokenizer if built.tokenizer.takes_text else None,
            on_start=lambda: torch.set_num_threads(num_threads),  # per thread with OpenMP
            thread=thread,
        )
    built.followers.on_failure(client.fail)
    if built.inspection.profiler is not None:
        built.inspection.profiler.ask = client.ask
    return LaunchedEngine(built, client)


async def _start_pooling(config: ServeConfig, task: Task, show_progress: bool) -> LaunchedEngine:
    path = locate_model(config.model)
    with _building() as thread:
        built = await asyncio.wrap_future(
            thread.call(
                partial(build_pooling, config, path, task, show_progress=show_progress),
            )
        )
        client = LocalEngineClient(
            built.engine,
            None,
            on_start=lambda: torch.set_num_threads(built.torch_threads),
            thread=thread,
        )
    return LaunchedEngine(built, client)


@contextmanager
def _building() -> Iterator[EngineThread]:
    """Start the engine's thread, which ends after its call if the block fails."""
    thread = EngineThread()
    thread.start()
    try:
        yield thread
    except BaseException:
        thread.end_with()
        raise


def task_of(config: ServeConfig) -> Task | None:
    """Return the configured model's pooling task; None = it generates text. Raises ConfigError."""
    path = locate_model(config.model)
    return pooling_task(path, config.model.task, config.model.config_overrides)


def build_follower(
    plan: EnginePlan, rank: int, meeting: Meeting, *, adapting: Adapting = NO_ADAPTERS
) -> Follower:
    """Load the share of a rank other than 0 and join the other ranks.

    plan:      rank 0's, except for the path of the model on this node
    adapting:  as at rank 0, whose adapter slots are in the plan
    """
    layout = Layout(rank=rank, tp_size=plan.tp_size, pp_size=plan.pp_size)
    with _open_share(plan, layout, adapting, show_progress=False) as (model, fill):
        fill(None)
    offload_as_planned(model, plan)
    pool = _make_pool(plan, model, adapting)
    channel, group = join(meeting, layout, plan.device)
    table = make_table(plan)
    built = build_forward(model, plan, table, _kernels(), group)
    torch.set_num_threads(built.torch_threads)
    return Follower(built.forward, table, channel, group, pool, shared_tokens=built.shared_tokens)


def _dump_as_configured(model: DecoderModel | FallbackModel, config: ServeConfig) -> None:
    debug = config.debug
    if debug.tensor_dump_dir is not None:
        assert isinstance(model, DecoderModel), "plans refuse dumps of others"
        folder = Path(debug.tensor_dump_dir)
        dump_tensors(model, folder, max_passes=debug.tensor_dump_passes)


def _delete_as_configured(plan: EnginePlan, config: ServeConfig) -> None:
    if config.model.delete_after_load:
        delete_weights(plan.model_path, plan.load_format)


def _check_kind(config: ServeConfig, team: Team | None) -> Team:
    if (task := task_of(config)) is not None:
        raise ConfigError(
            f"{config.model.path} generates no text (model.task is {task}): serve it with `remora "
            "serve`, or use remora.engine.pooling.embedder.Embedder in a script"
        )
    if team is None and config.parallel.num_ranks > 1:
        raise ConfigError(
            f"parallel.tp_size * parallel.pp_size is {config.parallel.num_ranks}: only `remora "
            "serve` runs several ranks, which Ray places; set both to 1 here"
        )
    return team or NoTeam()


def _plan(
    config: ServeConfig, facts: ModelFacts, machine: MachineFacts, path: Path, adapting: Adapting
) -> EnginePlan:
    draft = read_draft_facts(config, facts)
    plan = plan_with_draft(config, facts, machine, path, adapting.room, draft)
    return with_kv_scales(plan, config, facts)


def _make_sampler(
    config: ServeConfig,
    plan: EnginePlan,
    facts: ModelFacts,
    tokenizer: Tokenizer,
    token_sampler: TokenSampler,
) -> Sampler:
    spellings = Spellings(tokenizer.vocab_size, tokenizer.token_bytes, tokenizer.special_ids)
    if config.grammar.token_healing:
        spellings.prepare()
    return Sampler(
        max_rows=plan.max_running_requests,
        vocab_size=facts.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        token_sampler=token_sampler,
        spellings=spellings,
        processors=load_processors(plan.logit_processors),
    )


def _make_runner(
    config: ServeConfig,
    plan: EnginePlan,
    facts: ModelFacts,
    tokenizer: Tokenizer,
    built: BuiltForward,
    table: InputBatch,
    followers: Followers,
    group: Group,
    pool: AdapterPool | None,
) -> LocalRunner:
    sampler = _make_sampler(config, plan, facts, tokenizer, built.token_sampler)
    return LocalRunner(
        built.forward,
        sampler,
        table,
        followers,
        group,
        pool,
        device_tokens=built.device_tokens,
        drafter=build_drafter(
            Target(
                config=config,
                plan=plan,
                built=built,
                table=table,
                sampler=sampler,
                tokenizer=tokenizer,
                vocab_size=facts.vocab_size,
                cache=cache_dir(),
            )
        ),
    )


def _make_engine(
    plan: EnginePlan, facts: ModelFacts, tokenizer: Tokenizer, runner: LocalRunner
) -> Engine:
    return Engine(
        plan,
        runner,
        eos_token_ids=tokenizer.eos_token_ids,
        vocab_size=facts.vocab_size,
        tokenizer=tokenizer if tokenizer.takes_text else None,
        overlap=plan.on_device.overlap,
        speculation=build_speculation(
            plan,
            vocab_size=facts.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            possible_drafts=runner.possible_drafts,
        ),
    )


def _fit(
    plan: EnginePlan,
    config: ServeConfig,
    facts: ModelFacts,
    model: DecoderModel | FallbackModel,
    meter: Meter,
    total_bytes: int,
) -> EnginePlan:
    """Give the KV pool the device memory that the largest steps leave free."""
    step_bytes = measure(model, plan, meter)
    return refit_with_draft(
        plan,
        config,
        facts,
        free_bytes=meter.free_bytes(),
        total_bytes=total_bytes,
        step_bytes=step_bytes,
    )


def _open_share(
    plan: EnginePlan, layout: Layout, adapting: Adapting, show_progress: bool
) -> AbstractContextManager[tuple[DecoderModel | FallbackModel, Fill]]:
    bind_rank(plan.numa_nodes, layout.rank)
    torch.set_num_threads(plan.num_threads)
    check_host_memory(plan)
    return open_served_model(
        plan.model_path,
        dtype=DTYPES[plan.dtype],
        load_format=plan.load_format,
        device=plan.device,
        show_progress=show_progress,
        layout=layout,
        edit=adapting.edit,
        loading=plan.loading,
        held=plan.on_device.held_weights,
        host_layers=() if plan.offload is None else plan.offload.layers,
    )


def _packed_cache(
    config: ServeConfig, plan: EnginePlan, facts: ModelFacts, adapting: Adapting
) -> PackedCache | None:
    """Return the cache of a checkpoint that is rounded on loading; None = it has none."""
    keys = config.model
    is_rounded = plan.formats is not None
    has_files = plan.load_format != "dummy" and not keys.delete_after_load
    if keys.packed_cache is None or not (is_rounded and has_files and adapting.edit is None):
        return None
    return PackedCache.of(
        plan.model_path,
        plan.load_format,
        facts.fingerprint,
        root=cache_dir() / PACKED,
        limit_bytes=keys.packed_cache,
    )


def _make_pool(
    plan: EnginePlan, model: DecoderModel | FallbackModel, adapting: Adapting
) -> AdapterPool | None:
    """Allocate adapter slots in a loaded model, before its kernels are prepared."""
    if plan.adapters is None or adapting.make_pool is None:
        return None
    assert isinstance(model, DecoderModel), "plans refuse adapters for others"
    source = open_weights(
        plan.model_path, plan.load_format, device=plan.device, loading=plan.loading
    )
    config = model.config
    everywhere = DecoderModel(config, dtype=model.dtype, device="meta").allocate_slots(
        plan.adapters
    )
    places = dict.fromkeys(everywhere) | model.allocate_slots(plan.adapters)
    return adapting.make_pool(plan.adapters, places, source, RenamingRules(config.rules))


def make_table(plan: EnginePlan) -> InputBatch:
    """Allocate the rows that the plan allows."""
    return InputBatch(
        max_rows=plan.max_running_requests,
        max_tokens=plan.max_sequence_tokens,
        page_size=plan.page_size,
        windowed=plan.windows is not None,
    )


def _kernels() -> Path:
    return cache_dir() / "kernels"


def read_machine(config: ServeConfig) -> MachineFacts:
    """Return facts about this machine, with the memory of the device that the model runs on."""
    gpus = tuple(f"cuda:{number}" for number in range(torch.cuda.device_count()))
    machine = read_machine_facts(devices=(*gpus, "cpu"))
    if not gpus or config.engine.device == "cpu":
        return machine
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return replace(
        machine,
        available_bytes=free_bytes,
        total_bytes=total_bytes,
        converts_e4m3=converts_e4m3(torch.device("cuda")),
    )
