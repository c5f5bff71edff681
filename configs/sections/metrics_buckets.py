"""Edges of histograms: keys of the section `metrics`, and a rule that makes some."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from remora.configs.fields import Section


def two_sided_exponential(middle: float, base: float, count: int) -> list[float]:
    """Return about `count` edges around `middle`, farther apart the farther from it.

    They stand at distances of base, base**2, ... to both sides; none is below 0.
    """
    distances = [base**power for power in range(1, math.ceil(count / 2) + 1)]
    below = [max(0.0, middle - distance) for distance in distances]
    above = [middle + distance for distance in distances]
    return sorted({*below, middle, *above})


def _check_ascending(edges: list[float]) -> list[float]:
    if any(right <= left for left, right in pairwise(edges)):
        raise PydanticCustomError("ascending", "must ascend, none of them twice")
    return edges


Edges = Annotated[
    list[Annotated[float, Field(ge=0, le=1e12)]],
    Field(min_length=1, max_length=256),
    AfterValidator(_check_ascending),
]


class BucketKeys(Section):
    """Edges of histograms, ascending; the last bucket, without an edge, is always there."""

    first_token_buckets_s: Edges | None = None
    """Upper edges of the buckets of time to first token. Default: 0.01 to 300 s."""

    inter_token_buckets_s: Edges | None = None
    """Of the time between two tokens. Default: 0.001 to 5 s."""

    request_buckets_s: Edges | None = None
    """Of the time of whole requests. Default: 0.01 to 300 s."""

    token_histograms: bool = True
    """Whether the lengths of prompts and outputs are shown as histograms."""

    prompt_token_buckets: Edges | None = None
    """Upper edges of the buckets of prompts' lengths in tokens. Default: powers of 2 to 131072."""

    output_token_buckets: Edges | None = None
    """Of outputs' lengths, likewise."""
