"""The engine's steps against what the device can do: decode, prefill, and the gap between steps.

Of a decode step the bound is reading weights and KV once at the speed of a copy, for experts those
that so many rows choose on average; of a prompt, its multiplications at the speed of a large
product. The gap is what a step of the whole engine takes beyond the same step launched back to
back. Memory is compared with what the plan left for steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from tests.benchmarks.gpu.built import (
    PAGE,
    STEPS,
    Built,
    answer,
    build,
    decode_steps,
    launched,
    step_inputs,
)
from tests.benchmarks.gpu.case import Case, Once
from tests.benchmarks.gpu.compiles import COMPILES
from tests.benchmarks.gpu.rows import TOKENS_PER_S, Row
from tests.benchmarks.gpu.setting import Setting
from tests.benchmarks.gpu.shapes import config_of

DECODES = ((1, 1024), (64, 1024), (8, 1024), (256, 1024), (1, 8192), (8, 8192), (64, 8192))
PROMPTS = (4096, 512, 128, 16384)
TINY_DECODES, TINY_PROMPTS = ((1, 64), (4, 64)), (64,)
GAPS, TINY_GAPS = ((64, 1024, 128), (1, 1024, 64), (256, 1024, 64)), ((3, 32, 6),)
# Shares of the bound: decode by rows, prompts by tokens.
ASKED_DECODE, ASKED_PREFILL, ASKED_GAP = {1: 0.80, 64: 0.75}, {4096: 0.70, 512: 0.60}, 0.05
START_S = 110.0  # weights, memory, compiling and capturing


def cases(setting: Setting) -> Iterator[Case]:
    """Yield the start of the engine, which later cases use, and its steps."""
    name, config = config_of(setting.options["model"], tiny=setting.is_tiny)
    built = Once(lambda: build(config, tiny=setting.is_tiny))
    yield Case(Row(model=name, what="start"), partial(start, name, built, setting), START_S)
    for rows, context in TINY_DECODES if setting.is_tiny else DECODES:
        about = Row(model=name, what=f"decode {rows} x {context}")
        yield Case(about, partial(decode, about, built, rows, context, setting), START_S)
    for num_tokens in TINY_PROMPTS if setting.is_tiny else PROMPTS:
        about = Row(model=name, what=f"prefill {num_tokens}")
        yield Case(about, partial(prefill, about, built, num_tokens, setting), START_S)
    for rows, prompt, output in TINY_GAPS if setting.is_tiny else GAPS:
        about = Row(model=name, what=f"engine {rows} x {prompt}+{output}")
        yield Case(about, partial(gap, about, built, (rows, prompt, output)), START_S)
    about = Row(model=name, what="memory beyond the plan")
    yield Case(about, partial(memory, about, built, setting), START_S)


def start(name: str, built: Callable[[], Built], setting: Setting) -> Iterator[Row]:
    """Report the seconds of each phase, and the KV that was left."""
    made = built()
    for phase, seconds in made.seconds.items():
        yield Row(model=name, what=f"start: {phase}").found(seconds, "s")
    yield Row(model=name, what="KV cache").found(made.plan.kv_bytes / 2**30, "GiB")
    if not setting.is_tiny:
        yield Row(model=name, what="kernels met at the start").found(
            COMPILES.num_kernels, "kernels", details={"compile_s": COMPILES.seconds}
        )


def decode(
    about: Row, built: Callable[[], Built], rows: int, context: int, setting: Setting
) -> Iterator[Row]:
    """Time decode steps launched back to back, tokens chosen in each."""
    made = built()
    if rows * (context + 2 * STEPS + PAGE) > made.plan.kv_tokens:
        yield Row(model=about.model, what=f"{about.what}: no room for its KV")
        return
    seconds = launched(made, decode_steps(rows, context))
    row = about.found(seconds * 1e3, "ms/step")
    if setting.bounds is not None:
        bound_s = made.decode_bytes(rows, context + STEPS / 2) / setting.bounds.bytes_per_s
        row = about.found(seconds * 1e3, "ms/step", share=bound_s / seconds, limit="bytes")
    asked = ASKED_DECODE.get(rows) if context == 1024 and not setting.is_tiny else None
    yield row if asked is None else row.asking_share(asked)


def prefill(
    about: Row, built: Callable[[], Built], num_tokens: int, setting: Setting
) -> Iterator[Row]:
    """Time a prompt computed in one step."""
    made = built()
    steps = [step_inputs(1, 0, num_tokens, grown=True)]
    launched(made, steps)
    seconds = statistics.median(launched(made, steps) for _ in range(5))
    row = about.found(seconds * 1e3, "ms")
    if setting.bounds is not None:
        bound_s = made.prefill_flops(num_tokens) / setting.bounds.flops_per_s
        row = about.found(seconds * 1e3, "ms", share=bound_s / seconds, limit="products")
    asked = None if setting.is_tiny else ASKED_PREFILL.get(num_tokens)
    yield row if asked is None else row.asking_share(asked)


def gap(about: Row, built: Callable[[], Built], sizes: tuple[int, int, int]) -> Iterator[Row]:
    """Answer prompts at once; compare a step with the same launched back to back."""
    rows, prompt, output = sizes
    made = built()
    engine, numbers = made.engine(), np.random.default_rng(1)

    def prompts() -> list[list[int]]:
        return [ids.tolist() for ids in numbers.integers(0, 500, (rows, prompt))]

    answer(engine, "warm", prompts(), [8] * rows)
    num_kernels = COMPILES.num_kernels
    run = answer(engine, "run", prompts(), [output] * rows)
    yield about.found(run.num_tokens / run.seconds, TOKENS_PER_S)
    met = Row(model=about.model, what=f"kernels met by {about.what}")
    yield met.found(COMPILES.num_kernels - num_kernels, "kernels").asking_at_most(0)
    if len(run.decode_s) <= 3:
        return
    step_s = statistics.median(run.decode_s[2:])
    middle = prompt + max(0, output - STEPS) // 2  # as many tokens before as on average
    alone_s = launched(made, decode_steps(rows, middle))
    row = Row(model=about.model, what=f"gap between steps at {rows} rows", is_headline=True)
    details = {"engine_ms": step_s * 1e3, "alone_ms": alone_s * 1e3}
    found = row.found(100 * (1 - alone_s / step_s), "%", details=details)
    yield found.asking_at_most(100 * ASKED_GAP) if made.plan.device == "cuda" else found


def memory(about: Row, built: Callable[[], Built], setting: Setting) -> Iterator[Row]:
    """Compare the greatest memory so far with all that the plan has used, and with the device."""
    made = built()
    if setting.is_tiny:
        yield Row(model=about.model, what="KV planned").found(made.plan.kv_bytes / 2**20, "MiB")
        return
    peak = torch.cuda.max_memory_reserved()
    free, total = torch.cuda.mem_get_info()
    details = {"peak_bytes": peak, "free_bytes": free, "kv_bytes": made.plan.kv_bytes}
    used = Row(model=about.model, what="memory of the device in use")
    yield used.found(100 * (total - free) / total, "%", details=details).asking_at_most(97.0)
    weights = sum(shard.memory.nbytes for shard in made.model.tensors().values())
    steps = torch.cuda.max_memory_allocated() - weights - made.plan.kv_bytes
    yield about.found(steps / 2**30, "GiB", details={"weight_bytes": weights, **details})
