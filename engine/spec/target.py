"""The built model that a drafter drafts for, and what the drafter shares with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from remora.configs.planning.plan import EnginePlan
from remora.configs.schema import ServeConfig
from remora.engine.runner.forward import BuiltForward
from remora.engine.runner.inputs import InputBatch
from remora.engine.sampling.sampler import Sampler
from remora.engine.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A model with its rows and its sampler.

    built:  its forward pass, whose threads a drafter uses, too
    cache:  directory of models and compiled kernels
    """

    config: ServeConfig
    plan: EnginePlan
    built: BuiltForward
    table: InputBatch
    sampler: Sampler
    tokenizer: Tokenizer
    vocab_size: int
    cache: Path
