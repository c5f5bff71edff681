"""What a step means for one sequence, as the caller's thread gets it."""

from __future__ import annotations

from remora.engine.scheduler.sequence import Sequence
from remora.engine.types import LogprobRows, RowFault, SequenceOutput


def output_of(
    seq: Sequence,
    *,
    token_ids: tuple[int, ...] = (),
    logprobs: LogprobRows | None = None,
    prompt_logprobs: tuple[LogprobRows, ...] = (),
    stop_token_id: int | None = None,
    error: RowFault | None = None,
) -> SequenceOutput:
    """Return the output of a sequence with its counters; its end, if it has ended."""
    return SequenceOutput(
        request_id=seq.request.request_id,
        index=seq.index,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        hidden_states=seq.hidden_states if seq.is_finished else None,
        finish_reason=seq.finish_reason,
        stop_token_id=stop_token_id,
        num_cached_tokens=seq.num_cached_tokens or 0,
        error=error,
        queue_s=seq.queue_s or 0.0,
        drafts=seq.drafts,
        predicted=seq.predicted,
    )
