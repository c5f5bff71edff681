"""The scheduling part of a plan: order and pace of sequences, reserved memory, step limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from remora.configs.errors import ConfigError
from remora.configs.facts import ModelFacts
from remora.configs.schema import ServeConfig
from remora.configs.sections.engine import EngineSection, SchedulePolicy


@dataclass(frozen=True, slots=True)
class DefaultLimits:
    """Limits of a step that the configuration does not give.

    running:      most sequences
    step_tokens:  most tokens, also of a prompt's chunk
    """

    running: int
    step_tokens: int


# On a CPU, each step reads an expert's weights for the few tokens that use it: models with experts
# take more tokens together.
ON_CPU, ON_CPU_WITH_EXPERTS = DefaultLimits(64, 512), DefaultLimits(64, 2048)
# On a GPU, by its memory: (GiB below which a line applies, limits). A step's activations grow with
# its tokens, and the gain of larger steps ends where products are bound by arithmetic.
ON_GPU = (
    (20, DefaultLimits(256, 2048)),  # T4, RTX 4000
    (60, DefaultLimits(256, 4096)),  # L4, A10, RTX 4090 and 5090, L40S, A100 40 GB
    (160, DefaultLimits(512, 8192)),  # A100 80 GB, H100, H20, H200
    (math.inf, DefaultLimits(512, 16_384)),  # B200, MI300X
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservePlan:
    """KV memory that admission reserves for outputs; see the keys in `sections/engine.py`."""

    full_usage: float | None = None
    expected_output_tokens: int | None = None
    min_tokens: int = 0
    free_fraction: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPlan:
    """Order and pace; see the keys in `sections/engine.py`, and for timeouts in `limits.py`."""

    policy: SchedulePolicy = "fcfs"
    use_priorities: bool = True
    mixed_steps: bool = True
    chunked_prefill: bool = True
    max_prefill_requests: int | None = None
    max_prefill_tokens: int | None = None
    admission_interval_steps: int = 1
    admission_interval_s: float = 0.0
    poll_interval_steps: int = 1
    waiting_timeout_s: float | None = None
    running_timeout_s: float | None = None
    reserve: ReservePlan = ReservePlan()


BY_ARRIVAL = SchedulingPlan()


def plan_scheduling(config: ServeConfig) -> SchedulingPlan:
    """Take the scheduling keys from the section `engine`."""
    engine = config.engine
    return SchedulingPlan(
        policy=engine.schedule_policy,
        use_priorities=engine.use_priorities,
        mixed_steps=engine.mixed_steps,
        chunked_prefill=engine.chunked_prefill,
        max_prefill_requests=engine.max_prefill_requests,
        max_prefill_tokens=engine.max_prefill_tokens,
        admission_interval_steps=engine.admission_interval_steps,
        admission_interval_s=engine.admission_interval_s,
        poll_interval_steps=engine.poll_interval_steps,
        waiting_timeout_s=config.limits.waiting_timeout_s,
        running_timeout_s=config.limits.running_timeout_s,
        reserve=ReservePlan(
            full_usage=engine.full_reserve_usage,
            expected_output_tokens=engine.expected_output_tokens,
            min_tokens=engine.min_reserved_tokens,
            free_fraction=engine.free_kv_fraction,
        ),
    )


def default_limits(model: ModelFacts, device: str, device_bytes: int) -> DefaultLimits:
    """Return the limits of a step on a device (cpu or cuda) with this memory in total."""
    if device == "cpu":
        return ON_CPU_WITH_EXPERTS if model.experts_per_token else ON_CPU
    return next(limits for below, limits in ON_GPU if device_bytes < below * 2**30)


def running_requests(engine: EngineSection) -> tuple[int, int]:
    """Return the least and the most running requests that a plan may allow, on any machine."""
    written = engine.max_running_requests
    if written is not None:
        return written, written
    defaults = [ON_CPU.running] if engine.device != "cuda" else []
    if engine.device != "cpu":
        defaults += [limits.running for _, limits in ON_GPU]
    return min(defaults), max(defaults)


def plan_limits(
    config: ServeConfig, model: ModelFacts, max_model_len: int, device: str, device_bytes: int
) -> tuple[int, int, int]:
    """Return (running requests, step tokens, chunk tokens); defaults give way to written values.

    device_bytes:  total memory of the device
    Raises ConfigError if prompts may not be chunked and do not fit one step.
    """
    engine, usual = config.engine, default_limits(model, device, device_bytes)
    running, max_step = engine.max_running_requests or usual.running, engine.max_step_tokens
    if max_step is None:
        max_step = max(
            usual.step_tokens,
            running,
            engine.prefill_chunk_tokens or 0,
            engine.max_prefill_tokens or 0,
            0 if engine.chunked_prefill else max_model_len,
        )
    running = min(running, max_step)
    if engine.chunked_prefill:
        return running, max_step, min(engine.prefill_chunk_tokens or usual.step_tokens, max_step)
    if max_step < max_model_len:
        raise ConfigError(
            f"engine.chunked_prefill = false: prompts of up to {max_model_len} tokens must fit one "
            f"step, and engine.max_step_tokens is {max_step}; set that to at least {max_model_len} "
            f"or leave it out, or set model.context_length to at most {max_step}"
        )
    return running, max_step, max_step
