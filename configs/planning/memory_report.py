"""What a model will take of the memory, and how many requests that serves: `remora plan`.

From the plan and the checkpoint's facts only; nothing is loaded. What a step needs is an estimate
for torch and for GPUs, where it is measured at start-up, and exact for native kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remora.configs.facts import ModelFacts
from remora.configs.planning.kv_budget import human_bytes
from remora.configs.planning.plan import EnginePlan

_FLOAT = 4
_PANEL = 64  # columns that native products write together
PROMPT_LOGPROB_ROWS = 64  # rows of logits that native steps have room for at least
_LENGTHS = (512, 2048, 8192, 32_768)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes of one rank, of the one that holds most.

    kv_token_bytes:  of one token
    concurrency:     sequences of a length, in tokens, that the KV cache holds at a time
    """

    weight_bytes: int
    adapter_bytes: int
    kv_bytes: int
    step_bytes: int
    kv_token_bytes: int
    num_ranks: int
    concurrency: Sequence[tuple[int, int]]

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.adapter_bytes + self.kv_bytes + self.step_bytes


def report(plan: EnginePlan, model: ModelFacts, *, is_native: bool) -> MemoryReport:
    """Return what a plan takes.

    is_native:  whether native kernels of a CPU compute
    """
    # With windows: a token's part of what those layers share. One page is for padding.
    token_bytes = max(1, plan.kv_bytes // (plan.kv_tokens + plan.page_size))
    lengths = sorted({*(n for n in _LENGTHS if n < plan.max_model_len), plan.max_model_len})
    return MemoryReport(
        weight_bytes=plan.weight_bytes,
        adapter_bytes=plan.adapter_bytes,
        kv_bytes=plan.kv_bytes,
        step_bytes=step_bytes(plan, model, is_native=is_native),
        kv_token_bytes=token_bytes,
        num_ranks=plan.num_ranks,
        concurrency=[(n, _sequences(plan, n)) for n in lengths],
    )


def step_bytes(plan: EnginePlan, model: ModelFacts, *, is_native: bool) -> int:
    """Return what a step's activations, logits and tables take."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    attended = model.num_heads * model.head_dim
    widths = (model.hidden_size, model.hidden_size, heads, attended, model.intermediate_size)
    angles = 2 * plan.max_sequence_tokens * model.head_dim * _FLOAT
    if is_native:
        normal_bytes, written_bytes = _operand_bytes(plan)
        rows = max(plan.max_running_requests, PROMPT_LOGPROB_ROWS)
        stream, normal, made, context, gated = (_whole_panels(width) for width in widths)
        tokens = (stream + max(stream, made)) * _FLOAT + int(
            normal * normal_bytes + (context + gated + normal) * written_bytes
        )
        if model.experts_per_token:  # what routers read; and rows for each expert, in and out
            of_expert = int(normal * normal_bytes) + stream * _FLOAT
            tokens += stream * _FLOAT + model.experts_per_token * of_expert
        if model.kv_vectors == 1:  # queries of latents, values, and what both are made of
            tokens += int(context * normal_bytes) + (context + heads) * _FLOAT
        logits = _whole_panels(model.vocab_size) * _FLOAT + int(normal * normal_bytes)
        return plan.max_step_tokens * tokens + rows * logits + angles // 2
    item = 2 if plan.dtype in ("bfloat16", "float16") else _FLOAT
    gates = 2 * model.intermediate_size  # gate and up, beside their product
    tokens = (sum(widths) + gates) * item // plan.tp_size
    return plan.max_step_tokens * tokens + plan.max_running_requests * model.vocab_size * _FLOAT


def lines(found: MemoryReport, plan: EnginePlan, sizes: Sequence[int] = ()) -> list[str]:
    """Return the report as lines of text.

    sizes:  memory of devices, in bytes, to say what would fit in them
    """
    of_rank = f" on each of {found.num_ranks} ranks" if found.num_ranks > 1 else ""
    text = [
        f"model      {plan.served_model_name}, {plan.dtype}"
        + (f", weights {plan.quantization}" if plan.quantization != "none" else ""),
        f"device     {plan.device}",
        f"weights    {human_bytes(found.weight_bytes)}{of_rank}",
    ]
    if found.adapter_bytes:
        text.append(f"adapters   {human_bytes(found.adapter_bytes)}{of_rank}")
    text += [
        f"KV cache   {human_bytes(found.kv_bytes)}{of_rank}: {plan.kv_tokens:,} tokens of "
        f"{human_bytes(found.kv_token_bytes)}",
        *_of_windows(plan),
        f"steps      {human_bytes(found.step_bytes)}{of_rank}",
        f"together   {human_bytes(found.total_bytes)}{of_rank}",
        "at a time  "
        + ", ".join(f"{number:,} sequences of {n:,} tokens" for n, number in found.concurrency),
        f"batch      {plan.max_running_requests} sequences at most (engine.max_running_requests)",
    ]
    for size in sizes:
        tokens = _tokens_in(found, size)
        text.append(
            f"in {human_bytes(size):<8}"
            + (f"{tokens:,} tokens of KV cache" if tokens > 0 else "the weights do not fit")
        )
    return text


def _of_windows(plan: EnginePlan) -> list[str]:
    room = plan.windows
    if room is None:
        return []
    tokens = room.num_pages * plan.page_size
    return [
        f"windows    {tokens:,} of these tokens are kept in the {sum(room.layers)} of "
        f"{len(room.layers)} layers that look back {room.window:,} at most"
    ]


def _tokens_in(found: MemoryReport, size: int) -> int:
    fixed = found.weight_bytes + found.adapter_bytes + found.step_bytes
    return max(0, size - fixed) // found.kv_token_bytes


def _sequences(plan: EnginePlan, length: int) -> int:
    pages = -(-length // plan.page_size)
    room = plan.windows
    most = plan.num_pages // pages
    if room is not None:  # a page more, since windows begin amid one
        most = min(most, room.num_pages // min(pages, -(-room.window // plan.page_size) + 1))
    return min(most, plan.max_running_requests)


def _operand_bytes(plan: EnginePlan) -> tuple[float, float]:
    """Return the bytes of a value that products read, alone and where it is in floats first.

    Quantised ones are int8 with a scale and a sum for each group.
    """
    if plan.quantization != "none":
        grouped = 1 + 8 / {"int8": 64, "int4": 32}[plan.quantization]
        return grouped, grouped + _FLOAT
    each = 2 if plan.dtype == "bfloat16" else _FLOAT
    return each, each


def _whole_panels(size: int) -> int:
    return -(-size // _PANEL) * _PANEL
