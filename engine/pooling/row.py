"""The tokens of one input of a pooling model. Knows no torch, as what only serves need not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of one text, or of a pair of them.

    second:  where the second text of a pair begins; None = there is one text
    """

    token_ids: Sequence[int]
    second: int | None = None
