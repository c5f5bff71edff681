"""Which rows of beam searches continue which, as a part of a StepPlan. Arrays, no sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

NO_COPIES: Int32Array = np.empty((2, 0), dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamMoves:
    """Rows that continue rows, all at once: each as its source was before.

    rows:       [N]
    sources:    [N] may repeat, and may be the row itself
    token_ids:  [N] the token that the row continues with
    num_kept:   [N] leading pages of the source that the row uses from now on
    copies:     [2, M] pages, and the new pages that their contents are copied to first
    """

    rows: Int32Array
    sources: Int32Array
    token_ids: Int64Array
    num_kept: Int32Array
    copies: Int32Array


def join_moves(parts: Sequence[BeamMoves]) -> BeamMoves | None:
    """Return the moves of several searches as one; None = there are none."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    return BeamMoves(
        rows=np.concatenate([part.rows for part in parts]),
        sources=np.concatenate([part.sources for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        num_kept=np.concatenate([part.num_kept for part in parts]),
        copies=np.concatenate([part.copies for part in parts], axis=1),
    )
