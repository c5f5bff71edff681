"""A model of one rank on a GPU: what attends and chooses, what is recorded, how much fits.

`forward.py` does the same for CPUs and for ranks that share a model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from remora.configs.errors import ConfigError
from remora.configs.planning.device_plan import DevicePlan
from remora.configs.planning.plan import EnginePlan
from remora.engine.attention.latent import PagedLatents
from remora.engine.attention.torch_backend import TorchAttention
from remora.engine.attention.triton_backend import TritonAttention
from remora.engine.attention.windowed import WindowedAttention
from remora.engine.fallback.model import FallbackModel
from remora.engine.graphs.cuda_graphs import GraphRunner, no_garbage_collection
from remora.engine.graphs.device_forward import DeviceForward, Limits
from remora.engine.graphs.device_sampler import DeviceTokenSampler
from remora.engine.kv.pages import pages_needed
from remora.engine.models.config import DecoderConfig
from remora.engine.models.decoder import DecoderModel
from remora.engine.observe.progress import progress_bar
from remora.engine.protocols import AttentionBackend, Model
from remora.engine.runner.device_memory import Meter, largest_step, measure_steps
from remora.engine.runner.eager import make_batch
from remora.engine.runner.inputs import on_dump_page
from remora.engine.sampling.token_sampler import HostTokenSampler, TokenSampler
from remora.kernels import sampling as sampling_kernels
from remora.kernels.attention.decode import FIXED_SPLIT_TOKENS, FIXED_SPLITS

MIN_SPLIT_TOKENS = 128  # what is worth a program of its own

logger = logging.getLogger(__name__)


def make_attention(
    model: DecoderModel | FallbackModel,
    plan: EnginePlan,
    num_pages: int,
    num_window_pages: int | None = None,
) -> AttentionBackend:
    """Make the plan's attention backend over KV pools of its own.

    num_window_pages:  of layers with a window, where they have their own; None = the plan's
    """
    latent = model.config.attention.latent if isinstance(model, DecoderModel) else None
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
    backend: Callable[..., AttentionBackend] = TorchAttention
    if plan.on_device.attention_backend == "triton":
        if isinstance(model, DecoderModel):
            _check_triton_knows(model.config)
        backend = partial(TritonAttention, **split_options(plan.on_device))

    def make(num_layers: int, pages: int) -> AttentionBackend:
        return backend(
            num_layers=num_layers,
            num_pages=pages,
            page_size=plan.page_size,
            num_kv_heads=len(model.layout.kv_heads(model.config.num_kv_heads)),
            head_dim=model.config.head_dim,
            dtype=model.dtype,
            device=plan.device,
        )

    room = plan.windows
    if room is None:
        return make(len(model.layers), num_pages)
    apart = room.num_pages if num_window_pages is None else num_window_pages
    return WindowedAttention(
        [room.layers[layer] for layer in model.layers],
        lambda num_layers, windowed: make(num_layers, apart if windowed else num_pages),
    )


def _check_triton_knows(config: DecoderConfig) -> None:
    unknown = None
    if config.attention.alibi is not None:
        unknown = "ALiBi"
    elif any(layer.chunked for layer in config.layers):
        unknown = "chunks"
    if unknown is not None:
        raise ConfigError(
            f"triton's kernels of attention do not know {unknown}, which {config.architecture} has;"
            " set engine.attention_backend to torch"
        )


def split_options(how: DevicePlan) -> dict[str, Any]:
    """Return how the keys of rows that decode are divided, in the words of the kernels."""
    if how.splits is None and how.split_tokens is None:
        return {"fixed_split": how.deterministic}
    split_tokens = FIXED_SPLIT_TOKENS if how.splits is None else MIN_SPLIT_TOKENS
    return {
        "fixed_split": True,
        "max_splits": how.splits or FIXED_SPLITS,
        "split_tokens": how.split_tokens or split_tokens,
    }


def make_choosing(plan: EnginePlan) -> TokenSampler:
    """Make what chooses tokens from the logits of the plan's device."""
    if plan.on_device.attention_backend == "torch":
        return HostTokenSampler(sampling_kernels)
    return DeviceTokenSampler(torch.device(plan.device), plan.max_running_requests)


def compile_model(
    model: Model, attention: AttentionBackend, plan: EnginePlan, *, show_progress: bool
) -> Model:
    """Have the plan's decode steps of a model compiled; takes seconds to minutes."""
    from remora.engine.runner.compiled import TRACED_ROWS, CompiledModel  # loads much of torch

    counts = np.ones(TRACED_ROWS, dtype=np.int64)
    max_pages = pages_needed(plan.max_sequence_tokens, plan.page_size)
    nobody = on_dump_page(counts, max_pages, windowed=plan.windows is not None)
    batch = make_batch(nobody, page_size=plan.page_size, device=torch.device(plan.device))
    compiled = CompiledModel(model, attention, plan.on_device.compiled_rows)
    logger.info("compiling decode steps; torch takes seconds to minutes for it, once")
    started = time.perf_counter()
    with progress_bar("Compiling decode steps", 1, show_progress) as advance:
        compiled.compile(batch)
        advance(1)
    logger.info("compiled decode steps in %.1f s", time.perf_counter() - started)
    return compiled


def describe_compiled(plan: EnginePlan) -> str:
    """Say for people which steps are compiled."""
    return f"decode steps of up to {plan.on_device.compiled_rows} rows compiled"


def make_forward(
    model: DecoderModel | FallbackModel,
    plan: EnginePlan,
    num_pages: int,
    num_window_pages: int | None = None,
    *,
    compiling: bool = False,
) -> DeviceForward:
    """Make the forward pass over KV pools of so many pages; nothing is recorded yet.

    num_window_pages:  as in `make_attention`
    compiling:         whether what the plan says of compiling is done
    """
    limits = Limits(
        max_rows=plan.max_running_requests,
        max_tokens=plan.max_step_tokens,
        max_pages=pages_needed(plan.max_sequence_tokens, plan.page_size),
        windowed=plan.windows is not None,
    )
    if plan.on_device.deterministic and isinstance(model, DecoderModel):
        model.make_invariant()
    attention = make_attention(model, plan, num_pages, num_window_pages)
    steps: Model = model
    if compiling and plan.on_device.compiled_rows:
        steps = compile_model(model, attention, plan, show_progress=True)
    return DeviceForward(steps, attention, limits, torch.device(plan.device))


def measure(model: DecoderModel | FallbackModel, plan: EnginePlan, meter: Meter) -> int:
    """Return the bytes that the plan's largest steps need beside weights and KV."""
    choosing = make_choosing(plan)
    forward = make_forward(model, plan, 1, 1)
    needed = measure_steps(plan, model.vocab_size, forward, choosing, meter)
    logger.info("the largest steps need %.2f GiB beside weights and KV", needed / 2**30)
    return needed


def warm_up(forward: DeviceForward, plan: EnginePlan) -> None:
    """Run steps of few and of many rows, so that no request waits for a kernel to be compiled."""
    rows = 1
    while rows <= plan.max_running_requests:
        for num_tokens in (rows, rows + 1, 2 * rows):  # decode, both, extend
            if num_tokens <= plan.max_step_tokens:
                forward.forward(largest_step(plan, num_tokens, max_rows=rows))
        rows = 4 * rows + 1


def warm_up_choosing(choosing: TokenSampler, vocab_size: int, device: torch.device) -> None:
    """Do everything that a request may ask of its logits, for the same reason."""
    logits = torch.zeros(1, vocab_size, device=device)
    line, words = np.zeros(1, np.int64), np.full((1, -(-vocab_size // 32)), -1, np.int32)
    place, value = torch.zeros(1, dtype=torch.int64, device=device), logits.new_ones(1)
    sampling_kernels.add_at(logits, place, place, value)
    sampling_kernels.penalize(
        logits, place, place, value, repetition=value, presence=value, frequency=value
    )
    choosing.kernels.mask_tokens(logits, line, words)
    choosing.describe(logits, line, choosing.choose(logits, None), 1).take()


def record(
    forward: DeviceForward, plan: EnginePlan, graph_runner: GraphRunner, *, show_progress: bool
) -> None:
    """Record decode steps of the plan's sizes, the largest first."""
    how = plan.on_device
    collecting = nullcontext() if how.graph_gc else no_garbage_collection()
    with (
        collecting,
        progress_bar("Recording decode steps", len(how.graph_sizes), show_progress) as advance,
    ):
        forward.record(
            graph_runner,
            how.graph_sizes,
            adapters=plan.adapters is not None,
            padded=how.graph_padding,
            max_tokens=how.graph_max_tokens,
            on_each=lambda: advance(1),
        )
