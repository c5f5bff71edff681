"""Proposer and controller as the configuration says."""

from __future__ import annotations

from remora.configs.sections.speculation import SpeculationSection
from remora.engine.spec.controller import AdaptiveController, Controller, FixedController
from remora.engine.spec.ngram import NgramProposer
from remora.engine.spec.proposer import Proposer


def proposer_of(section: SpeculationSection) -> Proposer | None:
    """Return the source of drafts; None = no speculation."""
    if section.method == "none":
        return None
    return NgramProposer(
        shortest=section.shortest_suffix,
        longest=section.longest_suffix,
        max_bytes=section.index_memory,
    )


def controller_of(section: SpeculationSection) -> Controller:
    """Return what chooses draft lengths."""
    if section.adaptive:
        return AdaptiveController(section.max_drafts)
    return FixedController(section.max_drafts)
