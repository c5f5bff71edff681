"""The start-up banner: one screen that summarises what runs. Returns text; the caller prints it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from remora.configs.facts import MachineFacts, ModelFacts
from remora.configs.planning.kv_budget import human_bytes
from remora.configs.planning.kv_format import kv_gain
from remora.configs.planning.lora_slots import LoRASlotConfig
from remora.configs.planning.plan import EnginePlan

_WIDTH = 12


def banner(
    plan: EnginePlan,
    model: ModelFacts,
    machine: MachineFacts,
    phases: Mapping[str, float],
    *,
    version: str,
    kernels: str = "",
    endpoints: Sequence[str] = (),
    notes: Sequence[str] = (),
    first_token_s: float | None = None,
) -> str:
    """Return the start-up banner, without a newline at its end.

    phases:         name -> seconds, in order
    kernels:        description of the kernels
    endpoints:      addresses to show; empty for offline use
    notes:          further lines
    first_token_s:  measured time to first token of a short prompt
    """
    lines = [
        f"remora {version}",
        _line("model", f"{plan.served_model_name} ({_describe_model(model)})"),
        _line("from", str(plan.model_path)),
        _line("compute", _describe_compute(plan, machine)),
        *([_line("kernels", kernels)] if kernels else []),
        *([_line("ranks", _describe_ranks(plan))] if plan.num_ranks > 1 else []),
        _line("weights", _describe_weights(plan)),
        *([_line("adapters", _describe_adapters(plan, plan.adapters))] if plan.adapters else []),
        *([_line("KV cache", _describe_kv(plan, model))] if plan.task == "generate" else []),
        _line("batch", _describe_batch(plan)),
        *(_line("note", note) for note in notes),
        _line("start-up", _describe_phases(phases)),
    ]
    if first_token_s is not None:
        lines.append(_line("first token", f"{first_token_s * 1000:.0f} ms"))
    lines += [_line("serving", endpoint) for endpoint in endpoints]
    return "\n".join(lines)


def _line(name: str, text: str) -> str:
    return f"  {name:<{_WIDTH}} {text}"


def _describe_model(model: ModelFacts) -> str:
    return (
        f"{model.architecture}, {_describe_count(model.num_parameters)} parameters, "
        f"{model.num_layers} layers"
    )


def _describe_count(number: int) -> str:
    for suffix, size in (("B", 10**9), ("M", 10**6)):
        if number >= size:
            return f"{number / size:.3g}{suffix}"
    return str(number)


def _describe_compute(plan: EnginePlan, machine: MachineFacts) -> str:
    if plan.device != "cpu":
        return f"{plan.device}, {human_bytes(machine.total_bytes)}"
    return (
        f"cpu, {_count(plan.num_threads, 'thread')} on {_count(machine.num_cores, 'core')} "
        f"({machine.cpu_name})"
    )


def _describe_ranks(plan: EnginePlan) -> str:
    share = f"{plan.tp_size} share each layer" if plan.tp_size > 1 else "one for each stage"
    if plan.pp_size == 1:
        return f"{plan.num_ranks}: {share}"
    parts = _count(plan.micro_batches, "part")
    return f"{plan.num_ranks}: {plan.pp_size} stages of layers, {share}; steps in {parts}"


def _describe_weights(plan: EnginePlan) -> str:
    number = plan.dtype
    if plan.rounding:
        number = f"{plan.rounding}, {plan.cached_dtype} KV"
    stored = f"; {plan.stored}" if plan.stored else ""
    return f"{human_bytes(plan.weight_bytes)}{_of_rank(plan)} {number}{stored}"


def _of_rank(plan: EnginePlan) -> str:
    return "" if plan.num_ranks == 1 else f" on each of {plan.num_ranks} ranks,"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _describe_kv(plan: EnginePlan, model: ModelFacts) -> str:
    full = plan.kv_tokens / plan.max_model_len
    if full < 1:
        room = f"less than one full context: a sequence ends at {plan.max_sequence_tokens:,} tokens"
    else:
        room = f"{full:.1f} sequences of full length ({plan.max_model_len:,})"
    reuse = "on" if plan.prefix_cache else "off"
    windows = number = ""
    if plan.kv_dtype != "auto":
        gain = kv_gain(model, plan.dtype, plan.kv_dtype, plan.kv_skip_layers)
        number = f" in {plan.kv_dtype} ({gain:.2f} x the tokens of {plan.dtype})"
        number += " (but for some layers)" if plan.kv_skip_layers else ""
        number += f" with the scales of {plan.kv_scales_of}" if plan.kv_scales else ""
    if plan.windows is not None:
        tokens = plan.windows.num_pages * plan.page_size
        windows = f" ({tokens:,} in layers with a window of {plan.windows.window:,})"
    return (
        f"{plan.kv_tokens:,} tokens{windows} in {plan.num_pages:,} pages, "
        f"{human_bytes(plan.kv_bytes)}{number}"
        f"{_of_rank(plan).rstrip(',')}; "
        f"{room}; prefix cache {reuse}"
    )


def _describe_adapters(plan: EnginePlan, room: LoRASlotConfig) -> str:
    return (
        f"{room.num_slots} slots of rank {room.max_rank}, "
        f"{human_bytes(plan.adapter_bytes)}{_of_rank(plan).rstrip(',')}"
    )


def _describe_batch(plan: EnginePlan) -> str:
    if plan.task != "generate":
        return (
            f"task {plan.task}: up to {plan.max_step_tokens:,} tokens a step, texts of "
            f"{plan.max_model_len:,} at most; {plan.max_queued_requests:,} may wait"
        )
    return (
        f"up to {plan.max_running_requests} sequences and {plan.max_step_tokens:,} tokens a step, "
        f"prompts in chunks of {plan.prefill_chunk_tokens:,}; {plan.max_queued_requests} may wait"
    )


def _describe_phases(phases: Mapping[str, float]) -> str:
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in phases.items())
    return f"{sum(phases.values()):.1f} s" + (f" ({parts})" if parts else "")
