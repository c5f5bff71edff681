"""Joins rows of log-probabilities, and converts them to a caller's objects. Arrays, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from remora.engine.types import LogprobRows, TokenLogprob


def concat_logprobs(parts: Sequence[LogprobRows]) -> LogprobRows:
    """Join the lines of one sequence's parts, in order; all must hold the same `k`."""
    if len(parts) == 1:
        return parts[0]
    names = (field.name for field in fields(LogprobRows))
    return LogprobRows(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    )


def to_token_logprobs(lines: LogprobRows) -> tuple[TokenLogprob, ...]:
    """Return one TokenLogprob per line."""
    return tuple(
        TokenLogprob(token_id, logprob, rank, tuple(zip(top_ids, top_logprobs, strict=True)))
        for token_id, logprob, rank, top_ids, top_logprobs in zip(
            lines.token_ids.tolist(),
            lines.logprobs.tolist(),
            lines.ranks.tolist(),
            lines.top_ids.tolist(),
            lines.top_logprobs.tolist(),
            strict=True,
        )
    )
