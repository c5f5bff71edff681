"""Who is computed when, and how many at a time: keys of the section `engine`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from remora.configs.fields import Seconds, Section


class SchedulingKeys(Section):
    """Order, pace and numbers of sequences."""

    max_running_requests: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Most sequences computed in one step; the others wait."""

    max_step_tokens: Annotated[int, Field(ge=1, le=2**20)] = 512
    """Most tokens computed in one step, decoding sequences and prompt chunks together."""

    prefill_chunk_tokens: Annotated[int, Field(ge=1, le=2**20)] = 512
    """Most prompt tokens of one sequence in one step; longer prompts take several steps."""

    max_queued_requests: Annotated[int, Field(ge=0, le=2**20)] = 256
    """Most sequences that wait; a request beyond this is refused with HTTP 429."""

    max_queued_tokens: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Most tokens of prompts that wait, likewise; a single one always may. Default: 4 KV caches."""

    queue_timeout_s: Seconds = 60.0
    """Seconds that a request waits for its turn; beyond it HTTP 503."""

    schedule_conservativeness: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Factor on the output length that admission expects: higher = fewer preemptions, less use."""

    low_priority_first: bool = False
    """Whether a smaller `priority` of a request means sooner."""

    priority_preemption_gap: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """A waiting request preempts a running one whose priority is lower by more than this.
    Default: never."""
