"""The section `warmup`: what runs before a replica reports that it is ready."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from remora.configs.fields import Name, Section

Routine = Literal["generate", "sample", "logprobs", "grammar", "chat"]
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=65_536)]


class WarmupSection(Section):
    """Requests run before a replica is ready, so that clients do not wait for first-time work."""

    enabled: bool = True
    """Whether to warm up."""

    iterations: int = Field(default=2, ge=1, le=1000)
    """Runs of each routine over each input."""

    routines: list[Routine] = Field(default=["generate"], min_length=1, max_length=16)
    """What to run: generate = greedy decoding; sample = sampling with penalties; logprobs = with
    log-probabilities; grammar = with a constraint; chat = through the chat template. Models for
    embeddings or scores compute the inputs instead."""

    inputs: list[Name | TokenIds] = Field(default_factory=list, max_length=256)
    """Prompts, as texts or lists of token ids. Default: one short sentence."""
