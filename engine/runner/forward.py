"""Chooses and builds a plan's forward pass: a native step program, torch operations, or a device's.

Knows every reason why a model cannot run natively, and names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from remora.configs.errors import ConfigError
from remora.configs.planning.offload_plan import describe_offload
from remora.configs.planning.plan import EnginePlan
from remora.configs.planning.rounding import Rounding
from remora.engine.attention.libraries import describe
from remora.engine.fallback.model import FallbackModel
from remora.engine.graphs.coverage import not_covered
from remora.engine.graphs.cuda_graphs import CudaGraphRunner
from remora.engine.graphs.step_builder import StepProgramBuilder, StepShape
from remora.engine.graphs.step_weights import WeightFormats
from remora.engine.models.captures import Captures
from remora.engine.models.config import DecoderConfig
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.kv_scales import held_scales
from remora.engine.parallel.connect import RankGroup
from remora.engine.parallel.group import ALONE, Group
from remora.engine.parallel.shared_tokens import SharedTokens
from remora.engine.parallel.symmetric import SymmetricGroup, TorchSymmetricMemory
from remora.engine.protocols import DeviceTokens, Fill, ForwardPass, nothing_left
from remora.engine.runner import device
from remora.engine.runner.eager import EagerForward
from remora.engine.runner.inputs import InputBatch
from remora.engine.sampling.token_sampler import HostTokenSampler, TokenSampler
from remora.engine.weights.hold_quantised import describe_quantised
from remora.engine.weights.packed_cache import PackedCache
from remora.kernels import sampling as sampling_kernels
from remora.kernels.cpu.build import NativeUnavailable
from remora.kernels.cpu.library import Format, Library, Team
from remora.kernels.cpu.prebuilt import load_library
from remora.kernels.cpu.sampling import NativeSampling
from remora.kernels.kv_store import KV_DTYPES

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_INT8 = {32: Format.Q8_0, 64: Format.Q8}  # by the size of a group


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltForward:
    """A forward pass and facts about it.

    token_sampler:      samples from its logits
    description:        for logs and /server_info
    step_weight_bytes:  bytes of weights that a step of one token reads
    torch_threads:      threads for torch; a step program's own threads need the cores
    device_tokens:      receives tokens that only the device knows, if the pass may begin with them
    shared_tokens:      the same of several ranks
    team:               threads of a step program
    model:              the decoder, or this rank's share of it, if torch runs it
    """

    forward: ForwardPass
    token_sampler: TokenSampler
    description: str
    step_weight_bytes: int
    torch_threads: int
    device_tokens: DeviceTokens | None = None
    shared_tokens: SharedTokens | None = None
    team: Team | None = None
    model: DecoderModel | None = None


def build_forward(
    model: DecoderModel | FallbackModel,
    plan: EnginePlan,
    table: InputBatch,
    cache_dir: Path,
    group: Group = ALONE,
    fill: Fill = nothing_left,
    packed: PackedCache | None = None,
    *,
    team: Team | None = None,
    show_progress: bool = False,
) -> BuiltForward:
    """Build the plan's forward pass from a model, which it takes over.

    cache_dir:  of compiled kernels
    group:      of the rank whose share the model is; the pass uses it and does not close it
    fill:       loads the model's weights, unless they are loaded
    packed:     of what `fill` loads; None = packed weights are not kept
    team:       threads of another step program, which this one uses, too, if it is one; the two run
                in turns
    Raises ConfigError when the configuration demands what this machine or model cannot do.
    """
    is_alone = group.layout.num_ranks == 1
    if plan.device != "cpu" and (is_alone or plan.on_device.attention_backend != "torch"):
        fill(None)
        return _on_device(model, plan, group, show_progress=show_progress)
    if plan.device != "cpu":
        return _eager(model, plan, group, fill, f"torch on {plan.device}")
    if isinstance(model, FallbackModel):
        return _eager(model, plan, group, fill, f"torch, through transformers' {model.name}")
    if plan.cpu_kernels == "torch":
        _refuse_quantization(plan, "engine.cpu_kernels is torch")
        if plan.on_device.compiled_rows:
            return _compiled(model, plan, fill, show_progress=show_progress)
        return _eager(model, plan, group, fill, "torch (as engine.cpu_kernels says)")
    try:
        check_covered(model.config, plan, group.layout.num_ranks)
        library = Library(load_library(cache_dir))
    except NativeUnavailable as reason:
        _refuse_quantization(plan, str(reason))
        if plan.cpu_kernels == "native":
            raise ConfigError(
                f"engine.cpu_kernels is native, but {reason}; or set engine.cpu_kernels to auto"
            ) from reason
        if plan.on_device.deterministic:
            raise ConfigError(f"engine.deterministic needs native kernels: {reason}") from reason
        if plan.on_device.compiled_rows:
            return _compiled(model, plan, fill, show_progress=show_progress)
        return _eager(model, plan, group, fill, f"torch, which is slower, because {reason}")
    team = team or Team(library, plan.num_threads)
    return _native(model, plan, table, team, fill, packed)


def native_formats(rounding: Rounding, plain: Format, *, num_layers: int) -> WeightFormats:
    """Return the formats of native kernels for a plan's; `plain`: of weights not rounded."""
    native = {
        "int8": _INT8[rounding.int8_group],
        "int5": Format.Q5_1,
        "int4": Format.Q4,
        "none": plain,
    }
    return WeightFormats(
        layers=native[rounding.usual],
        head=native[rounding.head],
        parts={part: native[format] for part, format in rounding.parts.items()},
        overrides={
            (layer, part): native[each.format]
            for each in rounding.overrides
            for layer in (range(num_layers) if each.layers is None else each.layers)
            for part in each.parts
        },
    )


def check_covered(config: DecoderConfig, plan: EnginePlan, num_ranks: int) -> None:
    """Raise NativeUnavailable if step programs do not cover the model and plan."""
    gaps = not_covered(config)
    is_scaled = config.embedding.scale != config.block.residual_scale
    room = plan.adapters
    if is_scaled and room is not None and "embed_tokens" in room.targets:
        gaps.append("adapters of scaled embeddings")
    if gaps:
        raise NativeUnavailable(
            f"native kernels do not know {', '.join(gaps)}, which {config.architecture} has"
        )
    if num_ranks > 1:
        raise NativeUnavailable(
            f"native kernels run a model on one rank, and parallel.tp_size * pp_size is {num_ranks}"
        )
    if plan.page_size % 16:
        raise NativeUnavailable(
            f"native kernels need pages of a multiple of 16 tokens, and engine.page_size is "
            f"{plan.page_size}"
        )


def _refuse_quantization(plan: EnginePlan, reason: str) -> None:
    if plan.formats is not None:
        key = "model.quantization_overrides"
        if plan.quantization != "none":
            key = f"model.quantization = {plan.quantization}"
        raise ConfigError(
            f"{key} needs the native CPU kernels: {reason}. Otherwise leave the key out"
        )


def _native(
    model: DecoderModel,
    plan: EnginePlan,
    table: InputBatch,
    team: Team,
    fill: Fill,
    packed: PackedCache | None,
) -> BuiltForward:
    library = team.library
    plain = Format.of(DTYPES[plan.dtype])
    formats = WeightFormats(layers=plain, head=plain)
    if plan.formats is not None:
        formats = native_formats(plan.formats, plain, num_layers=len(model.config.layers))
    shape = StepShape(
        max_tokens=plan.max_step_tokens,
        max_rows=plan.max_running_requests,
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        max_positions=plan.max_sequence_tokens,
        windows=plan.windows,
        max_drafts=plan.max_drafts,
        captures=() if plan.speculation is None else plan.speculation.captures,
        kv_dtype=KV_DTYPES.get(plan.kv_dtype),
        kv_skip_layers=plan.kv_skip_layers,
        kv_scales=held_scales(plan.kv_scales, model.layers, range(model.config.num_kv_heads)),
    )
    already_compiled = "; nothing for engine.compile" if plan.on_device.compiled_rows else ""
    builder = StepProgramBuilder(model, team, shape, table, formats)
    packing = ""
    if packed is None:
        program = builder.build(fill)
    else:
        recipe = f"{library.name} {plan.dtype} {formats}"
        with packed.open(recipe, plan.num_threads) as store:
            program = builder.build(fill, store)
        if store.num_read:
            packing = f"; {store.num_read / 1e6:,.0f} MB of packed weights cached"
    return BuiltForward(
        forward=program,
        token_sampler=HostTokenSampler(NativeSampling(team)),
        description=f"native step program ({library.instructions}{packing}{already_compiled})",
        step_weight_bytes=program.weight_bytes,
        torch_threads=1,
        team=team,
    )


def _on_device(
    model: DecoderModel | FallbackModel, plan: EnginePlan, group: Group, *, show_progress: bool
) -> BuiltForward:
    weight_bytes = step_weight_bytes(model)
    _capture(model, plan)
    if plan.on_device.symmetric_memory and isinstance(group, RankGroup):
        group = SymmetricGroup(group, TorchSymmetricMemory(torch.device(plan.device)))
    forward = device.make_forward(model, plan, plan.num_pages, group=group, compiling=True)
    device.warm_up(forward, plan)
    token_sampler = device.make_token_sampler(plan, forward)
    device.warm_up_sampling(token_sampler, model.vocab_size, torch.device(plan.device))
    steps = "launched one by one"
    if plan.on_device.graph_sizes:
        device.capture(forward, plan, CudaGraphRunner(), show_progress=show_progress)
        steps = f"captured in graphs of up to {plan.on_device.graph_sizes[-1]} rows"
    prompts = "launched one by one"
    if plan.on_device.graph_prompt_sizes:
        prompts = f"in graphs of up to {plan.on_device.graph_prompt_sizes[-1]} tokens"
    if plan.on_device.compiled_rows:
        steps += f", {device.describe_compiled(plan)}"
    weights = describe_quantised(model) if isinstance(model, DecoderModel) else ""
    overlaps, shared = plan.on_device.overlap, None
    if overlaps and group.layout.num_ranks > 1:
        shared = SharedTokens(forward, group, torch.device(plan.device))
    return BuiltForward(
        forward=forward,
        token_sampler=token_sampler,
        description=(
            f"{describe(plan.on_device.attention_backend)} on {plan.device}, "
            f"decode steps {steps}, steps with prompts {prompts}"
            + (f"; weights of layers: {weights}" if weights else "")
            + (f"; {describe_offload(plan.offload)}" if plan.offload else "")
        ),
        step_weight_bytes=weight_bytes,
        torch_threads=plan.num_threads,
        device_tokens=(shared or forward) if overlaps else None,
        shared_tokens=shared,
        model=model if isinstance(model, DecoderModel) else None,
    )


def _compiled(
    model: DecoderModel, plan: EnginePlan, fill: Fill, *, show_progress: bool
) -> BuiltForward:
    """Build the eager pass with compiled decode steps, which need unpacked weights."""
    fill(None)
    weight_bytes = step_weight_bytes(model)
    attention = device.make_attention(model, plan, plan.num_pages)
    compiled = device.compile_model(model, attention, plan, show_progress=show_progress)
    return BuiltForward(
        forward=EagerForward(compiled, attention, page_size=plan.page_size, device=plan.device),
        token_sampler=HostTokenSampler(sampling_kernels),
        description=f"torch, {device.describe_compiled(plan)} (as engine.compile says)",
        step_weight_bytes=weight_bytes,
        torch_threads=plan.num_threads,
        model=model,
    )


def step_weight_bytes(model: DecoderModel | FallbackModel, num_tokens: int = 1) -> int:
    """Return the bytes of weights that a step of `num_tokens` reads, before packing."""
    if isinstance(model, FallbackModel):
        return model.step_weight_bytes()
    weight_bytes = sum(shard.memory.nbytes for shard in model.tensors().values())
    weight_bytes += sum(linear.num_bytes for _, linear in model.linears())
    for _, experts in model.experts():
        weight_bytes += experts.num_bytes if experts.quantised is not None else 0
        weight_bytes -= experts.idle_bytes(num_tokens)
    return weight_bytes if model.head.tied else weight_bytes - model.embedding.weight.nbytes


def _capture(model: DecoderModel | FallbackModel, plan: EnginePlan) -> None:
    """Let rank 0's model keep the states that the plan's draft head reads."""
    layers = () if plan.speculation is None else plan.speculation.captures
    if layers and isinstance(model, DecoderModel) and model.layout.rank == 0:
        model.captures = Captures(
            layers,
            max_tokens=max(plan.max_step_tokens, plan.max_running_requests),
            hidden_size=model.config.hidden_size,
            dtype=model.dtype,
            device=torch.device(plan.device),
        )


def _eager(
    model: DecoderModel | FallbackModel,
    plan: EnginePlan,
    group: Group,
    fill: Fill,
    description: str,
) -> BuiltForward:
    weight_bytes = step_weight_bytes(model)
    _capture(model, plan)
    if isinstance(model, DecoderModel):
        model.pack(fill)
    attention = device.make_attention(model, plan, plan.num_pages)
    forward = EagerForward(
        model,
        attention,
        page_size=plan.page_size,
        device=plan.device,
        group=group,
        micro_batches=plan.micro_batches if group.layout.num_ranks > 1 else 1,
    )
    return BuiltForward(
        forward=forward,
        token_sampler=HostTokenSampler(sampling_kernels),
        description=description,
        step_weight_bytes=weight_bytes,
        torch_threads=plan.num_threads,
        model=model if isinstance(model, DecoderModel) else None,
    )
