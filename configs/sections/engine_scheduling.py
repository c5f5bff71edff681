"""Who is computed when, and how many at a time: keys of the section `engine`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from remora.configs.fields import Seconds, Section

SchedulePolicy = Literal["fcfs", "lpm", "dfs-weight", "lof", "random"]


class SchedulingKeys(Section):
    """Order, pace and numbers of sequences."""

    max_running_requests: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Most sequences computed in one step; the others wait."""

    max_step_tokens: Annotated[int, Field(ge=1, le=2**20)] = 512
    """Most tokens computed in one step, decoding sequences and prompt chunks together."""

    prefill_chunk_tokens: Annotated[int, Field(ge=1, le=2**20)] = 512
    """Most prompt tokens of one sequence in one step; longer prompts take several steps."""

    chunked_prefill: bool = True
    """Whether a prompt may take several steps. Off: it waits until a step has room for all of it,
    and max_step_tokens grows to the context length."""

    max_prefill_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Most prompt tokens in one step, of all sequences; a prompt that may not be divided is let
    through alone. Default: max_step_tokens."""

    max_prefill_requests: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Most sequences whose prompts are computed in one step. Default: no limit."""

    mixed_steps: bool = True
    """Whether prompts and decoding sequences share steps. Off: prompts have steps of their own, and
    go first, so that first tokens come sooner and running outputs stall meanwhile."""

    max_queued_requests: Annotated[int, Field(ge=0, le=2**20)] = 256
    """Most sequences that wait; a request beyond this is refused with HTTP 429."""

    max_queued_tokens: Annotated[int, Field(ge=1, le=2**40)] | None = None
    """Most tokens of prompts that wait, likewise; a single one always may. Default: 4 KV caches."""

    queue_timeout_s: Seconds = 60.0
    """Seconds that a request waits for its turn; beyond it HTTP 503."""

    schedule_policy: SchedulePolicy = "fcfs"
    """Who of equal priority starts first: fcfs = by arrival, lpm = longest cached prefix,
    dfs-weight = prompts that share most with others, together, lof = longest possible output,
    random. None is passed over more than 64 times by later arrivals."""

    admission_interval_steps: Annotated[int, Field(ge=1, le=10_000)] = 1
    """While others run, waiting requests are looked at in every so many steps only."""

    admission_interval_s: Annotated[float, Field(ge=0, le=60)] = 0.0
    """Seconds between two such looks, at least."""

    poll_interval_steps: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Steps after which a busy engine takes in what has arrived: requests, and ends of them."""

    schedule_conservativeness: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Factor on the output length that admission expects: higher = fewer preemptions, less use."""

    expected_output_tokens: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Output length that admission expects of a request that may write as much, or 1.1 times what
    it has written. Default: a share of what it may write, which adapts to preemptions."""

    full_reserve_usage: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the KV cache in use from which admission reserves all that a request may write.
    0 = always. Default: never."""

    min_reserved_tokens: Annotated[int, Field(ge=0, le=2**20)] = 0
    """Tokens that admission reserves for the output of each request at least, if it may write as
    many."""

    free_kv_fraction: Annotated[float, Field(ge=0, le=0.95)] = 0.0
    """Share of the KV cache that admission leaves free while others run."""

    use_priorities: bool = True
    """Whether a request's `priority` counts. Off: all are equal."""

    low_priority_first: bool = False
    """Whether a smaller `priority` of a request means sooner."""

    priority_preemption_gap: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """A waiting request preempts a running one whose priority is lower by more than this.
    Default: never."""
