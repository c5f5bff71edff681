"""The scheduling part of a plan: order and pace of sequences, reserved memory, step limits."""

from __future__ import annotations

from dataclasses import dataclass

from remora.configs.errors import ConfigError
from remora.configs.facts import ModelFacts
from remora.configs.schema import ServeConfig
from remora.configs.sections.engine import SchedulePolicy

# Tokens of a step and of a prompt's chunk, if the configuration does not give them. Each step reads
# an expert's weights for the few tokens that use it: models with experts take more tokens together.
STEP_TOKENS, STEP_TOKENS_OF_EXPERTS = 512, 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservePlan:
    """KV memory that admission reserves for outputs; see the keys in `sections/engine.py`."""

    full_usage: float | None = None
    expected_output_tokens: int | None = None
    min_tokens: int = 0
    free_fraction: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPlan:
    """Order and pace; see the keys in `sections/engine.py`."""

    policy: SchedulePolicy = "fcfs"
    use_priorities: bool = True
    mixed_steps: bool = True
    chunked_prefill: bool = True
    max_prefill_requests: int | None = None
    max_prefill_tokens: int | None = None
    admission_interval_steps: int = 1
    admission_interval_s: float = 0.0
    poll_interval_steps: int = 1
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
        reserve=ReservePlan(
            full_usage=engine.full_reserve_usage,
            expected_output_tokens=engine.expected_output_tokens,
            min_tokens=engine.min_reserved_tokens,
            free_fraction=engine.free_kv_fraction,
        ),
    )


def plan_limits(config: ServeConfig, model: ModelFacts, max_model_len: int) -> tuple[int, int, int]:
    """Return (running requests, step tokens, chunk tokens); defaults give way to written values.

    Raises ConfigError if prompts may not be chunked and do not fit one step.
    """
    engine = config.engine
    usual = STEP_TOKENS_OF_EXPERTS if model.experts_per_token else STEP_TOKENS
    max_step = engine.max_step_tokens
    if max_step is None:
        max_step = max(
            usual,
            engine.max_running_requests,
            engine.prefill_chunk_tokens or 0,
            engine.max_prefill_tokens or 0,
            0 if engine.chunked_prefill else max_model_len,
        )
    running = min(engine.max_running_requests, max_step)
    if engine.chunked_prefill:
        return running, max_step, min(engine.prefill_chunk_tokens or usual, max_step)
    if max_step < max_model_len:
        raise ConfigError(
            f"engine.chunked_prefill = false: prompts of up to {max_model_len} tokens must fit one "
            f"step, and engine.max_step_tokens is {max_step}; set that to at least {max_model_len} "
            f"or leave it out, or set model.context_length to at most {max_step}"
        )
    return running, max_step, max_step
