"""What is run before a replica says that it is ready: the section `warmup`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from remora.configs.fields import Name, Section

Routine = Literal["generate", "sample", "logprobs", "grammar", "chat"]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=65_536)]


class WarmupSection(Section):
    """What is run before a replica is ready, so that no caller pays for first-time work."""

    enabled: bool = True
    """Whether anything is run."""

    iterations: int = Field(default=2, ge=1, le=1000)
    """How often each routine is run over each input."""

    routines: list[Routine] = Field(default=["generate"], min_length=1, max_length=16)
    """What is run: generate = the likeliest tokens; sample = drawn ones, with penalties; logprobs =
    with log-probabilities; grammar = held to a constraint; chat = by the model's chat template.
    Not for models that give embeddings or scores: they compute the inputs."""

    inputs: list[Name | TokenIds] = Field(default_factory=list, max_length=256)
    """Prompts, as texts or lists of token ids. Default: one short sentence."""
