"""The tokens of one input of a pooling model. Imports no torch, so that routers can use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of one text, or of a pair of them.

    second:  index of the first token of a pair's second text; None = one text
    """

    token_ids: Sequence[int]
    second: int | None = None
