"""Joins rows of log-probabilities, and converts them to a caller's objects. Arrays, no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from remora.engine.types import LOGPROB_FIELDS, LogprobRows, TokenLogprob


def concat_logprobs(parts: Sequence[LogprobRows]) -> LogprobRows:
    """Join the lines of one sequence's parts, in order; all must hold the same `k` and `m`."""
    if len(parts) == 1:
        return parts[0]
    return LogprobRows(
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in LOGPROB_FIELDS}
    )


def to_token_logprobs(lines: LogprobRows) -> tuple[TokenLogprob, ...]:
    """Return one TokenLogprob per line."""
    return tuple(
        TokenLogprob(token_id, logprob, rank, top, asked)
        for token_id, logprob, rank, top, asked in zip(
            lines.token_ids.tolist(),
            lines.logprobs.tolist(),
            lines.ranks.tolist(),
            _pairs(lines.top_ids, lines.top_logprobs, len(lines.token_ids)),
            _pairs(lines.asked_ids, lines.asked_logprobs, len(lines.token_ids)),
            strict=True,
        )
    )


def _pairs(
    token_ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32], num: int
) -> list[tuple[tuple[int, float], ...]]:
    """Return (id, log-probability) of each of `num` lines, which may have none."""
    if not token_ids.size:
        return [()] * num
    pairs = zip(token_ids.tolist(), logprobs.tolist(), strict=True)
    return [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
