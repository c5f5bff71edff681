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


def news_of(
    seq: Sequence,
    run: tuple[int, ...],
    logprobs: LogprobRows | None,
    *,
    is_first: bool,
    stop_token_id: int | None,
) -> SequenceOutput:
    """Return the output of a sequence with new tokens; `is_first`: with its first ones."""
    has_more = (
        is_first
        or seq.finish_reason is not None
        or logprobs is not None
        or seq.request.prediction_ids
    )
    if not has_more:  # most are so
        return SequenceOutput(
            request_id=seq.request.request_id,
            index=seq.index,
            token_ids=run,
            num_cached_tokens=seq.num_cached_tokens or 0,
            queue_s=seq.queue_s or 0.0,
            drafts=seq.drafts,
        )
    return output_of(
        seq,
        token_ids=run,
        logprobs=logprobs,
        prompt_logprobs=tuple(seq.prompt_logprob_parts) if is_first else (),
        stop_token_id=stop_token_id,
    )
