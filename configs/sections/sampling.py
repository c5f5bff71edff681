"""How tokens are chosen where a request says nothing: the section `sampling` of a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from remora.configs.fields import Section


class SamplingSection(Section):
    """How tokens are chosen where a request says nothing. Default of each: the model's own."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """0 = always the most likely token."""

    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Most candidates; 0 = all."""

    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of probability that candidates must reach together."""

    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Least probability of a candidate, as a share of the most likely one's."""

    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    """Factor against tokens that have come before; 1 = none."""

    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Taken from the logit of each token that the output has already. Default: 0."""

    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Taken from it for each time that it has. Default: 0."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Most tokens of a chat's answer. Default: the model's own, else what its context holds."""
