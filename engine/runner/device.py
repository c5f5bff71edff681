"""Builds the attention backend, token sampler, graphs and memory measurement of a plan's device.

`forward.py` chooses the forward pass.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from remora.configs.planning.device_plan import DevicePlan
from remora.configs.planning.graph_sizes import MAX_PROMPTS
from remora.configs.planning.plan import EnginePlan
from remora.engine.attention.latent import PagedLatents
from remora.engine.attention.libraries import (
    Needs,
    capability,
    check_supported,
    extra_bytes,
    make_backend,
)
from remora.engine.attention.mixed import MixedAttention
from remora.engine.attention.torch_backend import TorchAttention
from remora.engine.attention.triton_backend import TritonAttention
from remora.engine.attention.windowed import WindowedAttention
from remora.engine.fallback.model import FallbackModel
from remora.engine.graphs.cuda_graphs import CudaGraphRunner, GraphRunner, no_garbage_collection
from remora.engine.graphs.device_forward import DeviceForward, StepLimits
from remora.engine.graphs.device_sampler import DeviceTokenSampler
from remora.engine.graphs.device_stream import stream_of
from remora.engine.kv.pages import pages_needed
from remora.engine.models.decoder import DecoderModel
from remora.engine.models.kv_scales import held_scales
from remora.engine.observe.progress import progress_bar
from remora.engine.parallel.group import ALONE, Group
from remora.engine.parallel.rank_model import RankModel
from remora.engine.protocols import AttentionBackend, Model
from remora.engine.runner.device_memory import (
    Meter,
    largest_step,
    measure_graph,
    measure_steps,
)
from remora.engine.runner.eager import make_batch
from remora.engine.runner.inputs import dummy_step
from remora.engine.sampling.token_sampler import HostTokenSampler, TokenSampler
from remora.kernels import sampling as sampling_kernels
from remora.kernels.attention.decode import FIXED_SPLIT_TOKENS, FIXED_SPLITS
from remora.kernels.kv_store import KV_DTYPES

MIN_SPLIT_TOKENS = 128  # fewer keys are not worth a split

logger = logging.getLogger(__name__)


def make_attention(
    model: DecoderModel | FallbackModel,
    plan: EnginePlan,
    num_pages: int,
    num_window_pages: int | None = None,
) -> AttentionBackend:
    """Make the plan's attention backend and its KV pools.

    num_window_pages:  of window layers with a pool of their own; None = the plan's
    """
    latent = model.config.attention.latent if isinstance(model, DecoderModel) else None
    if plan.device != "cpu" and isinstance(model, DecoderModel):
        needs = Needs.of(model.config, model.dtype, plan.page_size, capability(plan.device))
        check_supported(plan.on_device.attention_backend, needs)
    if latent is not None:
        return PagedLatents(
            num_layers=len(model.layers),
            num_pages=num_pages,
            page_size=plan.page_size,
            row_size=latent.size + latent.rotary_size,
            latent_size=latent.size,
            dtype=model.dtype,
            device=plan.device,
        )
    room = plan.windows
    if room is None:
        return _make_pool(model, plan, model.layers, num_pages)
    window_pages = room.num_pages if num_window_pages is None else num_window_pages
    return WindowedAttention(
        [room.layers[layer] for layer in model.layers],
        lambda windowed: _make_pool(
            model,
            plan,
            [layer for layer in model.layers if room.layers[layer] == windowed],
            window_pages if windowed else num_pages,
        ),
    )


def _make_pool(
    model: DecoderModel | FallbackModel, plan: EnginePlan, layers: Sequence[int], num_pages: int
) -> AttentionBackend:
    """Make the backend of layers that share pages; skipped layers are not quantised."""
    skipped = [layer in plan.kv_skip_layers for layer in layers]
    kv_heads = model.layout.kv_heads(model.config.num_kv_heads)

    def make(is_skipped: bool) -> AttentionBackend:
        held = [layer for layer, each in zip(layers, skipped, strict=True) if each == is_skipped]
        return _make_backend(model, plan)(
            num_layers=len(held),
            num_pages=num_pages,
            page_size=plan.page_size,
            num_kv_heads=len(kv_heads),
            head_dim=model.config.head_dim,
            dtype=model.dtype,
            kv_dtype=None if is_skipped else KV_DTYPES.get(plan.kv_dtype),
            static_scales=None if is_skipped else held_scales(plan.kv_scales, held, kv_heads),
            device=plan.device,
        )

    return MixedAttention(skipped, make) if len({*skipped}) == 2 else make(any(skipped))


def _make_backend(
    model: DecoderModel | FallbackModel, plan: EnginePlan
) -> Callable[..., AttentionBackend]:
    name = plan.on_device.attention_backend
    if name == "torch":
        return TorchAttention
    if name == "triton":
        return partial(TritonAttention, **split_options(plan.on_device))
    assert isinstance(model, DecoderModel), "libraries attend for remora's own models only"
    return make_backend(name, plan, len(model.layout.share(model.config.num_heads)))


def split_options(how: DevicePlan) -> dict[str, Any]:
    """Return the decode kernel's split parameters."""
    if how.splits is None and how.split_tokens is None:
        return {"fixed_split": how.deterministic}
    split_tokens = FIXED_SPLIT_TOKENS if how.splits is None else MIN_SPLIT_TOKENS
    return {
        "fixed_split": True,
        "max_splits": how.splits or FIXED_SPLITS,
        "split_tokens": how.split_tokens or split_tokens,
    }


def make_token_sampler(plan: EnginePlan, forward: DeviceForward | None = None) -> TokenSampler:
    """Make the token sampler for logits of the plan's device.

    forward:  whose graphs may choose tokens, and with whose uploads parameters ride
    """
    if plan.on_device.attention_backend == "torch":
        return HostTokenSampler(sampling_kernels)
    stream = stream_of(torch.device(plan.device))
    step = None if forward is None else forward.sampling
    return DeviceTokenSampler(stream, _limits(plan).max_logits, step)


def compile_model(
    model: Model, attention: AttentionBackend, plan: EnginePlan, *, show_progress: bool
) -> Model:
    """Compile the plan's decode steps of a model; takes seconds to minutes."""
    from remora.engine.runner.compiled import TRACED_ROWS, CompiledModel  # loads much of torch

    max_pages = pages_needed(plan.max_sequence_tokens, plan.page_size)
    step = dummy_step(TRACED_ROWS, TRACED_ROWS, max_pages, windowed=plan.windows is not None)
    batch = make_batch(step, page_size=plan.page_size, device=torch.device(plan.device))
    compiled = CompiledModel(model, attention, plan.on_device.compiled_rows)
    logger.info("compiling decode steps; this takes seconds to minutes, once")
    started = time.perf_counter()
    with progress_bar("Compiling decode steps", 1, show_progress) as advance:
        compiled.compile(batch)
        advance(1)
    logger.info("compiled decode steps in %.1f s", time.perf_counter() - started)
    return compiled


def describe_compiled(plan: EnginePlan) -> str:
    """Return a human-readable description of which steps are compiled."""
    return f"decode steps of up to {plan.on_device.compiled_rows} rows compiled"


def make_forward(
    model: DecoderModel | FallbackModel,
    plan: EnginePlan,
    num_pages: int,
    num_window_pages: int | None = None,
    *,
    group: Group = ALONE,
    compiling: bool = False,
) -> DeviceForward:
    """Make the forward pass over KV pools of these sizes, without captured graphs.

    num_window_pages:  as in `make_attention`
    group:             of the rank whose share the model is
    compiling:         whether to compile the decode steps that the plan compiles
    """
    if isinstance(model, DecoderModel):
        model.tabulate_angles(plan.max_model_len)
        if plan.on_device.deterministic:
            model.make_invariant()
        else:
            model.narrow_routers()
    attention = make_attention(model, plan, num_pages, num_window_pages)
    steps: Model = model
    if group.layout.num_ranks > 1:
        steps = RankModel(model, group, micro_batches=plan.micro_batches)
    if compiling and plan.on_device.compiled_rows:
        steps = compile_model(model, attention, plan, show_progress=True)
    return forward_over(steps, attention, plan)


def forward_over(model: Model, attention: AttentionBackend, plan: EnginePlan) -> DeviceForward:
    """Make the forward pass of a model and its attention, without captured graphs."""
    return DeviceForward(model, attention, _limits(plan), stream_of(torch.device(plan.device)))


def _limits(plan: EnginePlan) -> StepLimits:
    return StepLimits(
        max_rows=plan.max_running_requests,
        max_tokens=plan.max_step_tokens,
        max_pages=pages_needed(plan.max_sequence_tokens, plan.page_size),
        windowed=plan.windows is not None,
        max_drafts=plan.max_drafts,
    )


def measure(
    model: DecoderModel | FallbackModel,
    plan: EnginePlan,
    meter: Meter,
    make_graphs: Callable[[], GraphRunner] = CudaGraphRunner,
) -> int:
    """Return the bytes that the plan's largest steps and graphs need, excluding weights and KV."""
    token_sampler = make_token_sampler(plan)
    forward = make_forward(model, plan, 1, 1)
    needed = measure_steps(plan, model.vocab_size, forward, token_sampler, meter)
    if isinstance(model, DecoderModel):
        needed += extra_bytes(plan, model.config)
    logger.info("memory: the largest steps need %.2f GiB, excluding weights and KV", needed / 2**30)
    how = plan.on_device
    if how.graph_sizes:
        num_graphs = len(how.graph_sizes) + len(how.graph_prompt_sizes)
        num_graphs *= 1 if plan.adapters is None else 2
        of_graph = measure_graph(plan, forward, make_graphs(), meter)
        logger.info("memory: %d graphs need %.2f MiB each", num_graphs, of_graph / 2**20)
        needed += num_graphs * of_graph
    return needed


def warm_up(forward: DeviceForward, plan: EnginePlan) -> None:
    """Run steps of all kinds and sizes, so that no request waits for a kernel's compilation.

    Kernels are compiled per class of tokens, of rows that decode, of rows that extend and of rows
    with adapters. A class ends at least 1.5 times above its beginning, so the ladder meets each.
    """
    most = plan.max_step_tokens
    rows = ladder(plan.max_running_requests)
    for num_rows in rows:
        forward.forward(largest_step(plan, min(2 * num_rows, most), max_rows=num_rows))
    for num_tokens in sorted({*rows, *ladder(most)}):
        if num_tokens <= most:
            forward.forward(largest_step(plan, num_tokens))
    if plan.adapters is not None:
        for num_tokens in (1, min(plan.max_running_requests, most), most):
            step = largest_step(plan, num_tokens)
            forward.forward(replace(step, adapters=np.ones_like(step.adapters)))


def ladder(most: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12 and so on below `most`, and `most`."""
    powers = [1 << power for power in range(most.bit_length())]
    return sorted(
        {min(size, most) for power in powers for size in (power, power * 3 // 2)} | {most}
    )


def warm_up_sampling(token_sampler: TokenSampler, vocab_size: int, device: torch.device) -> None:
    """Run every sampling operation, so that no request waits for a kernel's compilation."""
    logits = torch.zeros(1, vocab_size, device=device)
    line, words = np.zeros(1, np.int64), np.full((1, -(-vocab_size // 32)), -1, np.int32)
    place, value = torch.zeros(1, dtype=torch.int64, device=device), logits.new_ones(1)
    sampling_kernels.add_at(logits, place, place, value)
    sampling_kernels.penalize(
        logits, place, place, value, repetition=value, presence=value, frequency=value
    )
    token_sampler.kernels.mask_tokens(logits, line, words)
    token_sampler.describe(logits, line, token_sampler.choose(logits, None), 1).take()


def capture(
    forward: DeviceForward, plan: EnginePlan, graph_runner: GraphRunner, *, show_progress: bool
) -> None:
    """Capture steps of the plan's sizes, the largest first."""
    how = plan.on_device
    longest = min(plan.max_running_requests, MAX_PROMPTS) * plan.max_sequence_tokens
    prompt_sizes = [size for size in how.graph_prompt_sizes if size <= longest]
    num_graphs = len(how.graph_sizes) + len(prompt_sizes)
    collecting = nullcontext() if how.graph_gc else no_garbage_collection()
    with (
        collecting,
        progress_bar("Capturing graphs", num_graphs, show_progress) as advance,
    ):
        forward.capture(
            graph_runner,
            how.graph_sizes,
            prompt_sizes=prompt_sizes,
            num_slots=0 if plan.adapters is None else plan.adapters.num_slots,
            padded=how.graph_padding,
            max_tokens=how.graph_max_tokens,
            on_each=lambda: advance(1),
        )
