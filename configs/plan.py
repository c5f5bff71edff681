"""What will be run: ServeConfig + model facts + machine facts -> EnginePlan.

Pure: it opens no file and asks no device. `machine.py` and the engine's loader gather the facts.
Everything that depends on model or machine is decided here, once, and logged.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the checkpoint says of itself.

    dtype:                  of the stored weights: bfloat16, float16 or float32
    max_position:           longest sequence it was made for, in tokens
    num_parameters:         of the whole model, tied weights counted once
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    dtype: str
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What this machine offers the engine.

    num_cores:         physical cores that this process may use
    available_bytes:   memory that can be taken now without swapping, cgroup limits included
    """

    num_cores: int
    total_bytes: int
    available_bytes: int
    cpu_name: str
    cpu_features: tuple[str, ...]
    devices: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """Everything the engine needs to know, decided.

    num_pages:               pages of the KV pool, the dump page 0 not counted
    max_model_len:           most tokens of one sequence, prompt and output
    max_running_requests:    rows of a batch
    max_step_tokens:         tokens of one step, decode rows and prefill chunks together
    prefill_chunk_tokens:    most prompt tokens of one sequence in one step
    max_queued_requests:     waiting sequences beyond which requests are refused
    conservativeness:        factor on the share of unproduced output that admission reserves
    step_timeout_s:          watchdog: a step that runs longer fails the replica
    random_seed:             base of the seeds drawn for requests that have none
    low_priority_first:      whether a smaller `priority` value means sooner
    priority_preemption_gap: a waiting request preempts a running one whose priority is lower by
                             more than this; None = never
    """

    model_path: Path
    served_model_name: str
    load_format: str
    device: str
    dtype: str
    num_threads: int
    page_size: int
    num_pages: int
    kv_bytes: int
    weight_bytes: int
    max_model_len: int
    max_running_requests: int
    max_step_tokens: int
    prefill_chunk_tokens: int
    max_queued_requests: int
    prefix_cache: bool
    conservativeness: float
    step_timeout_s: float
    random_seed: int
    low_priority_first: bool
    priority_preemption_gap: int | None

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.num_pages * self.page_size

    @property
    def max_sequence_tokens(self) -> int:
        """Most tokens one sequence can have: the context, or the KV pool if that is smaller."""
        return min(self.max_model_len, self.kv_tokens)
