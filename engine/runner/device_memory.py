"""What a device's memory is needed for beside weights and KV: measured, before KV takes the rest.

The largest steps that the plan allows run once on a KV pool of a single page, which all rows read
and write. Knows nothing of how the rest is divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from remora.configs.planning.plan import EnginePlan
from remora.engine.kv.pages import pages_needed
from remora.engine.protocols import ForwardPass
from remora.engine.runner.inputs import StepInputs, on_dump_page
from remora.engine.sampling.token_sampler import Draws, TokenSampler

GRAPH_BYTES = 8 * 2**20  # of a recorded graph, beside the memory that all of them share
LOGIT_BYTES = 4  # what all of them leave their logits in


class Meter(Protocol):
    """Memory of a device."""

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Run something; return by how much more memory was held amid it than before."""
        ...

    def free_bytes(self) -> int:
        """Return what could be taken now."""
        ...


class CudaMeter:
    """Memory of the current GPU."""

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Run, wait for the device, and ask torch's allocator."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def free_bytes(self) -> int:
        """Ask the driver, once torch has given back what it does not use."""
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])


@torch.inference_mode()
def measure_steps(
    plan: EnginePlan, vocab_size: int, forward: ForwardPass, choosing: TokenSampler, meter: Meter
) -> int:
    """Return the bytes that the largest steps need, and graphs of decode steps beside them.

    forward:  of the plan's limits, on a KV pool of one page
    """

    def run(inputs: StepInputs) -> None:
        num_rows = len(inputs.logit_index)
        draws = Draws(
            temperature=np.ones(num_rows, np.float32),
            uniforms=np.full(num_rows, 0.5),
            top_k=np.full(num_rows, min(20, vocab_size), np.int64),
            top_p=np.full(num_rows, 0.9),
            min_p=np.zeros(num_rows, np.float32),
        )
        choosing.choose(forward.forward(inputs), draws).take()

    largest = largest_step(plan, plan.max_step_tokens)
    run(largest_step(plan, 1))  # compiles kernels, and lets libraries allocate for good
    needed = meter.peak_bytes(lambda: run(largest))
    if plan.on_device.graph_sizes:
        most = plan.on_device.graph_sizes[-1]
        needed += meter.peak_bytes(lambda: run(largest_step(plan, most)))
        needed += GRAPH_BYTES * len(plan.on_device.graph_sizes) + LOGIT_BYTES * most * vocab_size
    return needed


def largest_step(plan: EnginePlan, num_tokens: int, *, max_rows: int | None = None) -> StepInputs:
    """Return a step of as many tokens in as many rows as may be, all on the dump page."""
    num_rows = min(plan.max_running_requests, num_tokens, max_rows or num_tokens)
    counts = np.full(num_rows, num_tokens // num_rows, dtype=np.int64)
    counts[num_rows - num_tokens % num_rows :] += 1
    counts = np.minimum(counts, plan.max_sequence_tokens)
    max_pages = pages_needed(plan.max_sequence_tokens, plan.page_size)
    return on_dump_page(counts, max_pages, windowed=plan.windows is not None)
