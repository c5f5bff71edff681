"""Measures the memory that steps need on a device, before the KV pool takes the rest.

The plan's largest steps run once on a KV pool of a single page, which all rows read and write.
Knows nothing of how the rest is divided.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch

from remora.configs.planning.plan import EnginePlan
from remora.engine.graphs.cuda_graphs import GraphRunner
from remora.engine.graphs.device_forward import DeviceForward
from remora.engine.kv.pages import pages_needed
from remora.engine.protocols import ForwardPass
from remora.engine.runner.inputs import StepInputs, dummy_step
from remora.engine.sampling.token_sampler import Draws, TokenSampler

TRIAL_GRAPHS = 4  # captured to measure one: the driver takes memory in blocks
LOGIT_BYTES = 4  # float32, in the buffer that all graphs share


class Meter(Protocol):
    """Memory of a device."""

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Call `run`; return the peak of allocated bytes meanwhile, minus those before."""

    def free_bytes(self) -> int:
        """Return the bytes that can be allocated now."""

    def driver_bytes(self, run: Callable[[], object]) -> int:
        """Call `run`; return the bytes that are taken since, besides those of tensors."""


class CudaMeter:
    """Memory of the current GPU."""

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Call `run`, wait for the device, and read torch's allocator statistics."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def free_bytes(self) -> int:
        """Empty torch's cache, then ask the driver."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def driver_bytes(self, run: Callable[[], object]) -> int:
        """Call `run`, wait for the device, and compare what torch has not reserved."""
        before = _unreserved_bytes()
        run()
        return max(0, _unreserved_bytes() - before)


def _unreserved_bytes() -> int:
    """Return the bytes of the current GPU that are taken, but not by torch's allocator."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


@torch.inference_mode()
def measure_steps(
    plan: EnginePlan,
    vocab_size: int,
    forward: ForwardPass,
    token_sampler: TokenSampler,
    meter: Meter,
) -> int:
    """Return the bytes that the largest steps need, and buffers that graphs share.

    forward:  of the plan's limits, on a KV pool of one page
    """

    def run(inputs: StepInputs) -> None:
        num_rows = len(inputs.logit_index)
        draws = Draws(
            temperature=np.ones(num_rows, np.float32),
            keys=np.arange(num_rows),
            top_k=np.full(num_rows, min(20, vocab_size), np.int64),
            top_p=np.full(num_rows, 0.9),
            min_p=np.zeros(num_rows, np.float32),
        )
        token_sampler.choose(forward.forward(inputs), draws).take()

    largest = largest_step(plan, plan.max_step_tokens)
    run(largest_step(plan, 1))  # compiles kernels, and lets libraries allocate for good
    needed = meter.peak_bytes(lambda: run(largest))
    how = plan.on_device
    if how.graph_sizes:
        steps = [
            largest_step(plan, sizes[-1])
            for sizes in (how.graph_sizes, how.graph_prompt_sizes)
            if sizes
        ]
        needed += max(meter.peak_bytes(partial(run, step)) for step in steps)  # they share a pool
        needed += LOGIT_BYTES * how.graph_sizes[-1] * vocab_size
    return needed


@torch.inference_mode()
def measure_graph(
    plan: EnginePlan, forward: DeviceForward, graph_runner: GraphRunner, meter: Meter
) -> int:
    """Return the bytes that the driver takes for a graph, besides the pool that all share.

    Measures graphs of the largest decode step: the number of launches decides, which is alike in
    all. Closes the pass and the runner.
    """
    size = plan.on_device.graph_sizes[-1]
    forward.capture(graph_runner, [size])  # loads code and lets libraries allocate
    taken = meter.driver_bytes(lambda: forward.capture(graph_runner, [size] * TRIAL_GRAPHS))
    forward.close()
    return -(-taken // TRIAL_GRAPHS)


def largest_step(plan: EnginePlan, num_tokens: int, *, max_rows: int | None = None) -> StepInputs:
    """Return a dummy step with the most rows and tokens that the plan allows, up to these."""
    num_rows = min(plan.max_running_requests, num_tokens, max_rows or num_tokens)
    num_tokens = min(num_tokens, num_rows * plan.max_sequence_tokens)
    max_pages = pages_needed(plan.max_sequence_tokens, plan.page_size)
    return dummy_step(
        num_tokens,
        num_rows,
        max_pages,
        windowed=plan.windows is not None,
        max_drafts=plan.max_drafts,
    )
