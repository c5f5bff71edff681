"""Which drafts turn out right: each is compared with the token that is sampled in its place.

A row with d drafts has 1 + d lines of logits: the first predicts the token after the known ones,
line i the token after draft i. Each line's token is sampled as it would be without drafts, with the
random number of its own position. The row gets the tokens up to the first one that differs from the
next draft; later lines follow a wrong draft. So drafts decide how many tokens a step yields, and
never which: output is the same as without drafts.

Knows plans and tokens; no logits, no distributions.

Legend: L lines.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from remora.engine.types import BoolArray, IntArray, StepPlan, TokenArray

NO_DRAFT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLines:
    """The lines of logits of a step in which rows have drafts.

    rows:       [L] each line's row, in the plan's order
    offsets:    [L] drafts before the line in its row
    draft_ids:  [L] the draft that follows; NO_DRAFT at the last line of a row
    """

    rows: IntArray
    offsets: npt.NDArray[np.int64]
    draft_ids: TokenArray

    @classmethod
    def of(cls, plan: StepPlan) -> DraftLines | None:
        """Return the lines of a plan; None if no row has drafts."""
        if not len(plan.draft_ids):
            return None
        counts = 1 + plan.num_drafts[plan.samples].astype(np.int64)
        ends = np.cumsum(counts)
        draft_ids = np.full(ends[-1], NO_DRAFT, np.int64)
        is_followed = np.ones(ends[-1], np.bool_)
        is_followed[ends - 1] = False
        draft_ids[is_followed] = plan.draft_ids
        return cls(
            rows=np.repeat(plan.rows[plan.samples], counts),
            offsets=np.arange(ends[-1]) - np.repeat(ends - counts, counts),
            draft_ids=draft_ids,
        )

    def kept(self, token_ids: TokenArray, faulty: Container[int] = ()) -> BoolArray:
        """Return which lines count [L]: the first of each row, and those after right drafts.

        faulty:  lines without a token; one behind a draft does not count, and the next step of its
                 row begins there
        """
        is_right = (token_ids == self.draft_ids).tolist()
        kept: list[bool] = []
        for line, offset in enumerate(self.offsets.tolist()):
            follows = offset > 0 and kept[-1] and is_right[line - 1]
            kept.append(offset == 0 or (follows and line not in faulty))
        return np.array(kept, np.bool_)
