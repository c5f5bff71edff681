"""Decide everything that depends on model or machine: ServeConfig + facts -> EnginePlan.

Pure: opens no file and queries no device. `configs/facts.py` says where the facts come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from remora.configs.errors import ConfigError
from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.model_names import HubModel, parse_model_name
from remora.configs.planning.device_plan import ONE_BY_ONE, DevicePlan, plan_device
from remora.configs.planning.fallback import check_fallback
from remora.configs.planning.kv_budget import (
    NOTHING_RESERVED,
    Budget,
    Reserved,
    max_replicas,
    ranks_on_machine,
)
from remora.configs.planning.kv_format import (
    DTYPE_BYTES,
    KVScales,
    kv_fields,
    kv_layer_bytes,
)
from remora.configs.planning.loading import PLAIN_LOADING, Loading
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.configs.planning.offload_plan import OffloadPlan, plan_offload
from remora.configs.planning.rounding import Rounding, describe_rounding, plan_rounding
from remora.configs.planning.scheduling_plan import (
    BY_ARRIVAL,
    SchedulingPlan,
    plan_limits,
    plan_scheduling,
)
from remora.configs.planning.shares import (
    check_divisible,
    update_elements,
)
from remora.configs.planning.speculation_plan import SpeculationPlan, plan_speculation
from remora.configs.planning.weight_plan import (
    describe_stored,
    device_layer_bytes,
    held_as_stored,
    weight_bytes_of,
)
from remora.configs.planning.window_plan import KVLimits, WindowRoom, size_pools
from remora.configs.schema import ServeConfig
from remora.configs.sections.engine import KVDtype
from remora.configs.sections.pooling import Task

# Keys of the section `engine` that every plan copies, and that a plan for generation copies.
_AS_WRITTEN = (
    "max_queued_requests",
    "page_size",
    "step_timeout_s",
    "random_seed",
    "low_priority_first",
)
_OF_GENERATION = (
    "cpu_kernels",
    "prefix_cache",
    "prefix_eviction",
    "share_prompts",
    "priority_preemption_gap",
    "logit_processors",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What the engine runs, and with which limits.

    num_threads:             of one rank
    numa_nodes:              NUMA node of each rank; empty = ranks are not bound
    num_pages:               pages of the KV pool, not counting the dump page 0
    kv_bytes, weight_bytes:  on the device, of the rank with the most
    max_model_len:           most tokens of one sequence, prompt and output
    max_running_requests:    rows of a batch
    max_step_tokens:         tokens of one step, decode rows and prefill chunks together
    prefill_chunk_tokens:    most prompt tokens of one sequence in one step
    max_queued_requests:     most waiting sequences
    max_queued_tokens:       most prompt tokens of waiting sequences; None = no limit
    share_prompts:           whether outputs of one prompt share its pages
    conservativeness:        factor on the expected output that admission reserves
    step_timeout_s:          a step that runs longer fails the replica
    random_seed:             base of the seeds for requests without one
    low_priority_first:      whether a lower `priority` value runs first
    priority_preemption_gap: a waiting request preempts a running one whose priority is lower by
                             more than this; None = never
    tp_size, pp_size:        ranks that share each layer, and pipeline stages
    micro_batches:           parts that a step is split into for the stages
    adapters:                adapter slots; None = no slots
    adapter_bytes:           memory of the slots, of the rank with the most
    on_device:               how a step runs on its device
    logit_processors:        name in requests -> import path
    loading:                 how the checkpoint is read
    scheduling:              order and pace of sequences, and reserved KV memory
    kv_dtype:                format of cached K and V; "auto" = `dtype`
    kv_skip_layers:          layers whose K and V are cached in `dtype` all the same
    kv_scales:               static scales of K and V in 8 bits; () = each token has its own
    kv_scales_of:            where they are from; "" = there are none
    windows:                 pages of sliding-window layers; None = all layers share pages
    task:                    what the model does; only "generate" has a KV cache
    stored:                  how weights stored quantised are computed; empty = none
    rounding:                formats to which weights are rounded on loading; empty = none
    formats:                 to which weights are rounded on a CPU; None = to none
    speculation:             how rows get drafts; None = not at all
    embedding_size:          numbers of each embedding that a prompt may be given as; None = prompts
                             are token ids only
    draft:                   of the draft model, with the rows, steps and pages of this plan; None =
                             there is none
    offload:                 weights in host memory; None = all are on the device
    """

    model_path: Path
    served_model_name: str
    load_format: str
    device: str
    dtype: str
    quantization: str
    cpu_kernels: str
    num_threads: int
    page_size: int
    num_pages: int
    kv_bytes: int
    weight_bytes: int
    max_model_len: int
    max_running_requests: int
    max_step_tokens: int
    prefill_chunk_tokens: int
    max_queued_requests: int
    prefix_cache: bool
    conservativeness: float
    step_timeout_s: float
    random_seed: int
    low_priority_first: bool
    priority_preemption_gap: int | None
    max_queued_tokens: int | None = None
    numa_nodes: tuple[int, ...] = ()
    prefix_eviction: Literal["lru", "lfu"] = "lru"
    share_prompts: bool = True
    tp_size: int = 1
    pp_size: int = 1
    micro_batches: int = 1
    adapters: LoRASlotConfig | None = None
    adapter_bytes: int = 0
    on_device: DevicePlan = ONE_BY_ONE
    logit_processors: Mapping[str, str] = field(default_factory=dict)
    loading: Loading = PLAIN_LOADING
    scheduling: SchedulingPlan = BY_ARRIVAL
    kv_dtype: KVDtype = "auto"
    kv_skip_layers: tuple[int, ...] = ()
    kv_scales: KVScales = ()
    kv_scales_of: str = ""
    windows: WindowRoom | None = None
    task: Task = "generate"
    stored: str = ""
    rounding: str = ""
    formats: Rounding | None = None
    speculation: SpeculationPlan | None = None
    embedding_size: int | None = None
    draft: EnginePlan | None = None
    offload: OffloadPlan | None = None

    @property
    def max_drafts(self) -> int:
        """Most drafts of a row in one step."""
        return 0 if self.speculation is None else self.speculation.max_drafts

    @property
    def num_ranks(self) -> int:
        """Ranks of one replica."""
        return self.tp_size * self.pp_size

    @property
    def cached_dtype(self) -> str:
        """Name of the format of cached K and V."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV pool, in tokens."""
        return self.num_pages * self.page_size

    @property
    def max_open_sequences(self) -> int:
        """Most sequences running or queued at once."""
        return self.max_running_requests + self.max_queued_requests

    @property
    def max_sequence_tokens(self) -> int:
        """Most tokens of one sequence: the context length, or the KV pool if that is smaller."""
        if self.task != "generate":
            return self.max_model_len
        return min(self.max_model_len, self.kv_tokens)


def make_plan(
    config: ServeConfig,
    model: ModelFacts,
    machine: MachineFacts,
    model_path: Path,
    adapters: LoRASlotConfig | None = None,
    reserved: Reserved = NOTHING_RESERVED,
) -> EnginePlan:
    """Return the plan of a model that generates text.

    machine:   its memory is that of the model's device before the weights are loaded
    adapters:  slots for adapters that are not merged; targets may be the checkpoint's names
    reserved:  memory of a draft model
    Assumes that all replicas share this machine, with one node's ranks of each, and that with
    engine.device cuda each rank has its own GPU. Raises ConfigError, with settings that would work.
    """
    engine, parallel = config.engine, config.parallel
    check_fallback(config, model)
    check_divisible(model, tp_size=parallel.tp_size, pp_size=parallel.pp_size)
    dtype, device = pick_dtype(config, model), pick_device(config, machine)
    _check_device(config, device)
    stored = [] if config.model.load_format == "dummy" else list(model.stored)
    slots = None if adapters is None else adapters.with_remora_names(model.module_words)
    adapter_bytes = _adapter_bytes(config, model, dtype, slots)
    max_model_len, memory = pick_context(config, model), machine.total_bytes
    max_running, max_step, chunk = plan_limits(config, model, max_model_len, device, memory)
    on_device = plan_device(
        config,
        device,
        machine.has_triton,
        max_running,
        bool(adapters),
        max_step_tokens=max_step,
        libraries=machine.attention_libraries,
        is_ours=model.implementation == "remora",
    )
    held = held_as_stored(config, stored, device, on_device)
    formats = plan_rounding(config.model, model, device, machine.cpu_features)
    layer_bytes = device_layer_bytes(model, dtype, on_device, held)
    offload = plan_offload(config, model, device, layer_bytes)
    weight_bytes = weight_bytes_of(config, model, dtype, device, on_device, held, formats, offload)
    budget = _budget(weight_bytes + adapter_bytes + reserved.weight_bytes, machine, device)
    plan = EnginePlan(
        **common_fields(config, model_path),
        **{key: getattr(engine, key) for key in _OF_GENERATION},
        device=device,
        dtype=dtype,
        num_threads=engine.num_threads or max(1, machine.num_cores // ranks_on_machine(config)),
        num_pages=0,
        kv_bytes=0,
        weight_bytes=weight_bytes,
        max_model_len=max_model_len,
        max_running_requests=max_running,
        max_step_tokens=max_step,
        prefill_chunk_tokens=chunk,
        conservativeness=engine.schedule_conservativeness,
        **_rank_fields(config),
        adapters=slots,
        adapter_bytes=adapter_bytes,
        on_device=on_device,
        offload=offload,
        stored=describe_stored(stored, held, dtype),
        **kv_fields(config, model, dtype, on_device, machine),
        **_rounding_fields(config, model, dtype, formats),
        speculation=plan_speculation(config, device),
        embedding_size=model.hidden_size if model.implementation == "remora" else None,
    )
    return _with_pools(plan, config, model, budget, reserved.token_bytes)


def _budget(weight_bytes: int, machine: MachineFacts, device: str) -> Budget:
    return Budget(
        weight_bytes=weight_bytes,
        available_bytes=machine.available_bytes,
        total_bytes=machine.total_bytes,
        device=device,
    )


def _rounding_fields(
    config: ServeConfig, model: ModelFacts, dtype: str, formats: Rounding | None
) -> dict[str, Any]:
    quantization, plain = config.model.quantization, 8.0 * DTYPE_BYTES[dtype]
    return {
        "quantization": quantization,
        "formats": formats,
        "rounding": describe_rounding(formats, quantization, model, plain=plain),
    }


def _rank_fields(config: ServeConfig) -> dict[str, Any]:
    parallel = config.parallel
    return {
        "tp_size": parallel.tp_size,
        "pp_size": parallel.pp_size,
        "micro_batches": parallel.micro_batches or parallel.pp_size,
    }


def common_fields(config: ServeConfig, model_path: Path) -> dict[str, Any]:
    """Return the fields that plans of all tasks take from the configuration."""
    return {
        "model_path": model_path,
        "served_model_name": served_name(config, model_path),
        "load_format": config.model.load_format,
        "loading": Loading.of(config.model),
        "scheduling": plan_scheduling(config),
        "numa_nodes": tuple(config.parallel.numa_nodes),
        **{key: getattr(config.engine, key) for key in _AS_WRITTEN},
    }


def refit(
    plan: EnginePlan,
    config: ServeConfig,
    model: ModelFacts,
    *,
    free_bytes: int,
    total_bytes: int,
    step_bytes: int,
    reserved: Reserved = NOTHING_RESERVED,
) -> EnginePlan:
    """Resize the KV pool to the memory that is free on the device once the weights are loaded.

    free_bytes:  free memory of the device, with weights and adapter slots allocated
    total_bytes: total memory of the device
    step_bytes:  memory of the largest steps, without weights and KV
    reserved:    memory of a draft model, which is still free
    Raises ConfigError, with settings that would work.
    """
    held_bytes = plan.weight_bytes + plan.adapter_bytes
    budget = Budget(
        weight_bytes=held_bytes + reserved.weight_bytes,
        available_bytes=held_bytes + free_bytes,
        total_bytes=total_bytes,
        step_bytes=step_bytes,
        device=plan.device,
    )
    return _with_pools(plan, config, model, budget, reserved.token_bytes)


def _with_pools(
    plan: EnginePlan,
    config: ServeConfig,
    model: ModelFacts,
    budget: Budget,
    reserved_bytes: int = 0,
) -> EnginePlan:
    """Return the plan with KV pools for its limits. Raises ConfigError.

    reserved_bytes:  of each token, for a draft model
    """
    engine = config.engine
    layer_bytes = kv_layer_bytes(
        model, plan.dtype, plan.kv_dtype, plan.kv_skip_layers, tp_size=plan.tp_size
    )
    is_native = plan.device == "cpu" and engine.cpu_kernels != "torch" and plan.num_ranks == 1
    if is_native and model.kv_vectors == 1:  # stored twice: in the layout of K and in that of V
        layer_bytes = [2 * each for each in layer_bytes]
    limits = KVLimits(
        layer_bytes=layer_bytes,
        max_running=plan.max_running_requests,
        max_model_len=plan.max_model_len,
        # With overlap, two steps are in flight.
        ahead_tokens=plan.prefill_chunk_tokens * (2 if plan.on_device.overlap else 1),
        reserved_bytes=reserved_bytes,
    )
    pools = size_pools(config, model, limits, budget)
    return replace(
        plan,
        num_pages=pools.num_pages,
        kv_bytes=pools.kv_bytes,
        windows=pools.windows,
        max_queued_tokens=engine.max_queued_tokens or 4 * pools.num_pages * engine.page_size,
    )


def served_name(config: ServeConfig, model_path: Path) -> str:
    """Return the name that clients use for the model."""
    remote = parse_model_name(config.model.path)
    if isinstance(remote, HubModel):
        return config.model.served_name or remote.repo_id
    written = Path(config.model.path).name or model_path.name
    return config.model.served_name or written.removesuffix(".gguf") or "model"


def pick_dtype(config: ServeConfig, model: ModelFacts) -> str:
    """Return the number format of weights and activations. Raises ConfigError."""
    dtype = model.dtype if config.model.dtype == "auto" else config.model.dtype
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"the checkpoint's number format is {dtype}, and remora computes in "
            f"{', '.join(DTYPE_BYTES)}; set model.dtype to one of them"
        )
    return dtype


def _adapter_bytes(
    config: ServeConfig, model: ModelFacts, dtype: str, slots: LoRASlotConfig | None
) -> int:
    """Return the bytes of the adapter slots of the rank with the most."""
    if slots is None:
        return 0
    tp_size, pp_size = config.parallel.tp_size, config.parallel.pp_size
    elements = update_elements(model, slots.targets, tp_size=tp_size, pp_size=pp_size)
    return slots.num_slots * slots.max_rank * elements * DTYPE_BYTES[dtype]


def _check_device(config: ServeConfig, device: str) -> None:
    _check_ranks(config, device)
    _check_live_weights(config, device)


def _check_ranks(config: ServeConfig, device: str) -> None:
    """Raise ConfigError for keys that several ranks or replicas exclude."""
    num_ranks = config.parallel.num_ranks
    num_processes = num_ranks * max_replicas(config)
    if device == "cuda" and config.engine.device == "auto" and num_processes > 1:
        raise ConfigError(
            f"engine.device = auto has found a GPU, and up to {num_processes} processes (replicas "
            "* tp_size * pp_size) would share it: set engine.device to cuda, so that Ray reserves "
            "a GPU for each, or to cpu"
        )
    if device != "cpu" or num_ranks == 1:
        return
    for key, value, plain in (
        ("engine.cpu_kernels", config.engine.cpu_kernels, "torch"),
        ("model.quantization", config.model.quantization, "none"),
        ("model.quantization_overrides", config.model.quantization_overrides or "auto", []),
    ):
        if value not in (plain, "auto"):
            raise ConfigError(
                f"{key} = {value}: native CPU kernels need one rank, and parallel.tp_size * "
                f"pp_size is {num_ranks}; set {key} to {plain}"
            )


def _check_live_weights(config: ServeConfig, device: str) -> None:
    for key in config.live_weights_keys if device != "cpu" else ():
        raise ConfigError(
            f"{key}: needs a CPU, and the device is {device}, where the KV cache takes the memory "
            "for a second copy of the weights; leave it out, or set engine.device to cpu"
        )


def pick_device(config: ServeConfig, machine: MachineFacts) -> str:
    """Return the kind of device that computes. Raises ConfigError."""
    kinds = {device.split(":")[0] for device in machine.devices}
    if config.engine.device == "auto":
        return "cuda" if "cuda" in kinds else "cpu"
    if config.engine.device not in kinds:
        raise ConfigError(
            f"engine.device = {config.engine.device}: this machine has "
            f"{', '.join(machine.devices)}; set engine.device to auto"
        )
    return config.engine.device


def pick_context(config: ServeConfig, model: ModelFacts) -> int:
    """Return the most tokens of one sequence. Raises ConfigError."""
    wanted = config.model.context_length
    if wanted is not None and wanted > model.max_position:
        raise ConfigError(
            f"model.context_length = {wanted}: the model supports at most {model.max_position} "
            f"tokens; set it to {model.max_position} or less"
        )
    return wanted or model.max_position
