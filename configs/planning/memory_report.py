"""Report a plan's memory use, and how many requests fit: `remora plan`.

Computed from plan and facts; nothing is loaded. The memory of a step is exact for native kernels
and an estimate otherwise; a GPU engine measures it at start-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remora.configs.facts import ModelFacts
from remora.configs.planning.kv_budget import human_bytes
from remora.configs.planning.kv_format import kv_gain
from remora.configs.planning.offload_plan import describe_offload
from remora.configs.planning.plan import EnginePlan

_FLOAT = 4
_PANEL = 64  # columns that native matrix products write together
PROMPT_LOGPROB_ROWS = 64  # logits of prompt tokens that are computed at a time
_LENGTHS = (512, 2048, 8192, 32_768)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Bytes of the rank with the most.

    draft_bytes:     weights of the draft model, whose KV and steps are part of the others
    kv_token_bytes:  of one token
    kv_gain:         tokens in the KV cache per token that would fit in the model's own format
    concurrency:     (length in tokens, sequences of that length that fit the KV cache)
    """

    weight_bytes: int
    adapter_bytes: int
    draft_bytes: int
    kv_bytes: int
    step_bytes: int
    kv_token_bytes: int
    kv_gain: float
    num_ranks: int
    concurrency: Sequence[tuple[int, int]]

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        fixed = self.weight_bytes + self.adapter_bytes + self.draft_bytes
        return fixed + self.kv_bytes + self.step_bytes


def report(
    plan: EnginePlan, model: ModelFacts, draft: ModelFacts | None = None, *, is_native: bool
) -> MemoryReport:
    """Return the memory use of a plan.

    draft:      of the plan's draft model
    is_native:  with native CPU kernels
    """
    steps = step_bytes(plan, model, is_native=is_native)
    spec = plan.speculation
    draft_bytes = 0 if spec is None else spec.head_bytes
    if spec is not None and not is_native:
        steps += spec.state_bytes(plan.max_step_tokens, plan.max_running_requests)
    if plan.draft is not None and draft is not None:
        steps += step_bytes(plan.draft, draft, is_native=is_native)
        draft_bytes = plan.draft.weight_bytes
    # With windows, their bytes are spread over all tokens. One page is for padding.
    token_bytes = max(1, plan.kv_bytes // (plan.kv_tokens + plan.page_size))
    lengths = sorted({*(n for n in _LENGTHS if n < plan.max_model_len), plan.max_model_len})
    return MemoryReport(
        weight_bytes=plan.weight_bytes,
        adapter_bytes=plan.adapter_bytes,
        draft_bytes=draft_bytes,
        kv_bytes=plan.kv_bytes,
        step_bytes=steps,
        kv_token_bytes=token_bytes,
        kv_gain=kv_gain(model, plan.dtype, plan.kv_dtype, plan.kv_skip_layers),
        num_ranks=plan.num_ranks,
        concurrency=[(n, _sequences(plan, n)) for n in lengths],
    )


def logit_rows(max_rows: int, max_tokens: int, max_drafts: int) -> int:
    """Return the most lines of logits of a native step; a draft has a line of its own."""
    return max(min(max_rows * (1 + max_drafts), max_tokens), max_rows, PROMPT_LOGPROB_ROWS)


def step_bytes(plan: EnginePlan, model: ModelFacts, *, is_native: bool) -> int:
    """Return the bytes of a step's activations, logits and tables."""
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    attended = model.num_heads * model.head_dim
    widths = (model.hidden_size, model.hidden_size, heads, attended, model.intermediate_size)
    angles = 2 * plan.max_sequence_tokens * model.head_dim * _FLOAT
    if is_native:
        normal_bytes, written_bytes = _operand_bytes(plan)
        rows = logit_rows(plan.max_running_requests, plan.max_step_tokens, plan.max_drafts)
        stream, normal, made, context, gated = (_whole_panels(width) for width in widths)
        tokens = (stream + max(stream, made) + _PANEL) * _FLOAT + int(
            normal * normal_bytes + (context + gated + normal) * written_bytes
        )
        if model.experts_per_token:  # router inputs, and input and output rows of each expert
            of_expert = int(normal * normal_bytes) + stream * _FLOAT
            tokens += stream * _FLOAT + model.experts_per_token * of_expert
        if model.kv_vectors == 1:  # latent queries, values, and the inputs of both
            tokens += int(context * normal_bytes) + (context + heads) * _FLOAT
        logits = _whole_panels(model.vocab_size) * _FLOAT + int(normal * normal_bytes)
        return plan.max_step_tokens * tokens + rows * logits + angles // 2
    item = 2 if plan.dtype in ("bfloat16", "float16") else _FLOAT
    gates = 2 * model.intermediate_size  # gate and up; their product is in `widths`
    tokens = (sum(widths) + gates) * item // plan.tp_size
    return plan.max_step_tokens * tokens + plan.max_running_requests * model.vocab_size * _FLOAT


def lines(found: MemoryReport, plan: EnginePlan, sizes: Sequence[int] = ()) -> list[str]:
    """Return the report as text; `sizes`: device memories, in bytes, to report the fit of."""
    of_rank = f" on each of {found.num_ranks} ranks" if found.num_ranks > 1 else ""
    text = [
        f"model      {plan.served_model_name}, {plan.dtype}"
        + (f", weights {plan.rounding}" if plan.rounding else ""),
        f"device     {plan.device}",
        f"weights    {human_bytes(found.weight_bytes)}{of_rank}",
        *([f"quantised  {plan.stored}"] if plan.stored else []),
        *([] if plan.offload is None else [f"offload    {describe_offload(plan.offload)}"]),
    ]
    if found.draft_bytes and plan.draft is None:
        text.append(f"drafts     a head, weights {human_bytes(found.draft_bytes)}")
    if plan.draft is not None:
        rounded = f" {plan.draft.rounding}" if plan.draft.rounding else ""
        text.append(
            f"drafts     {plan.draft.served_model_name}, weights {human_bytes(found.draft_bytes)}"
            f"{rounded}"
        )
    if found.adapter_bytes:
        text.append(f"adapters   {human_bytes(found.adapter_bytes)}{of_rank}")
    text += [
        f"KV cache   {human_bytes(found.kv_bytes)}{of_rank}: {plan.kv_tokens:,} tokens of "
        f"{human_bytes(found.kv_token_bytes)}" + _of_format(found, plan),
        *_of_windows(plan),
        f"steps      {human_bytes(found.step_bytes)}{of_rank}",
        f"together   {human_bytes(found.total_bytes)}{of_rank}",
        "at a time  "
        + ", ".join(f"{number:,} sequences of {n:,} tokens" for n, number in found.concurrency),
        f"batch      {plan.max_running_requests:,} sequences (engine.max_running_requests) and "
        f"{plan.max_step_tokens:,} tokens (engine.max_step_tokens) a step at most",
    ]
    for size in sizes:
        tokens = _tokens_in(found, size)
        text.append(
            f"in {human_bytes(size):<8}"
            + (f"{tokens:,} tokens of KV cache" if tokens > 0 else "the weights do not fit")
        )
    return text


def _of_format(found: MemoryReport, plan: EnginePlan) -> str:
    if plan.kv_dtype == "auto":
        return ""
    return f" in {plan.kv_dtype}, {found.kv_gain:.2f} x the tokens of {plan.dtype}"


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
    fixed = found.total_bytes - found.kv_bytes
    return max(0, size - fixed) // found.kv_token_bytes


def _sequences(plan: EnginePlan, length: int) -> int:
    pages = -(-length // plan.page_size)
    room = plan.windows
    most = plan.num_pages // pages
    if room is not None:  # one more page, because a window may begin in the middle of one
        most = min(most, room.num_pages // min(pages, -(-room.window // plan.page_size) + 1))
    return min(most, plan.max_running_requests)


def _operand_bytes(plan: EnginePlan) -> tuple[float, float]:
    """Return the bytes per value of matrix operands, and of operands that are first in float32.

    Quantised operands are int8, with a scale and a sum for each group, in the
    groups of each part.
    """
    each = 2 if plan.dtype == "bfloat16" else _FLOAT
    if plan.formats is not None:
        grouped = sum(1 + 8 / size for size in plan.formats.groups)
        grouped += each if plan.formats.has_plain else 0
        return grouped, grouped + _FLOAT
    return each, each


def _whole_panels(size: int) -> int:
    return -(-size // _PANEL) * _PANEL
