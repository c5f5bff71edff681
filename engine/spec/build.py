"""Builds speculation as a plan says."""

from __future__ import annotations

from collections.abc import Iterable

from remora.configs.planning.plan import EnginePlan
from remora.configs.planning.speculation_plan import SpeculationPlan
from remora.engine.spec.controller import AdaptiveController, Controller, FixedController
from remora.engine.spec.ngram import NgramProposer
from remora.engine.spec.proposer import Proposer
from remora.engine.spec.speculation import Speculation


def build_speculation(
    plan: EnginePlan, *, vocab_size: int, eos_token_ids: Iterable[int]
) -> Speculation | None:
    """Return the plan's speculation; None if it has none."""
    spec = plan.speculation
    if spec is None:
        return None
    return Speculation(
        make_proposer(spec),
        make_controller(spec),
        max_drafts=spec.max_drafts,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
    )


def make_proposer(spec: SpeculationPlan) -> Proposer:
    """Return the plan's source of drafts."""
    return NgramProposer(shortest=spec.shortest, longest=spec.longest, max_bytes=spec.max_bytes)


def make_controller(spec: SpeculationPlan) -> Controller:
    """Return what chooses draft lengths."""
    return (
        AdaptiveController(spec.max_drafts)
        if spec.is_adaptive
        else FixedController(spec.max_drafts)
    )
