"""The section `sampling`: defaults of sampling parameters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from remora.configs.fields import Section


class SamplingSection(Section):
    """Values for requests that leave a sampling parameter out. Default of each: the model's own."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """Temperature; 0 = always the most likely token."""

    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    """Most candidate tokens; 0 = all."""

    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Cumulative probability of the candidate tokens."""

    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Least probability of a candidate token, relative to the most likely one."""

    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    """Factor against tokens that occur in prompt or output; 1 = none."""

    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from the logit of each token that the output contains. Default: 0."""

    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Subtracted from the logit of each token for every occurrence in the output. Default: 0."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Most output tokens of a chat. Default: the model's own, else the rest of the context."""
