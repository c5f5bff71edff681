"""How rows get drafts, and what must hold for it. Pure functions; knows no engine."""

from __future__ import annotations

from dataclasses import dataclass

from remora.configs.errors import ConfigError
from remora.configs.sections.speculation import SpeculationSection


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """Drafts from n-grams of a request's own prompt and output.

    max_drafts:         of a row in one step
    shortest, longest:  tokens of the n-grams that are looked up
    max_bytes:          memory of the index of all requests
    is_adaptive:        whether draft lengths follow measured acceptance and step times
    """

    max_drafts: int
    shortest: int
    longest: int
    max_bytes: int
    is_adaptive: bool = True


def check_speculation(*, device: str, overlap: bool, num_ranks: int = 1) -> None:
    """Raise ConfigError where rows cannot have drafts.

    overlap:  whether steps are planned before the tokens of the step before are known
    """
    if device != "cpu":
        raise ConfigError(
            f"speculation works on the CPU only, and the model runs on {device}: leave the section "
            "speculation out"
        )
    if num_ranks > 1:
        raise ConfigError(
            f"speculation works on one rank, and the model runs on {num_ranks}: leave the section "
            "speculation out"
        )
    if overlap:
        raise ConfigError(
            "speculation does not work while steps overlap (engine.overlap): leave one of them out"
        )


def plan_speculation(
    section: SpeculationSection, device: str, overlap: bool
) -> SpeculationPlan | None:
    """Return how rows get drafts; None = not at all. Raises ConfigError."""
    if section.method == "none":
        return None
    check_speculation(device=device, overlap=overlap)
    return SpeculationPlan(
        max_drafts=section.max_drafts,
        shortest=section.shortest_suffix,
        longest=section.longest_suffix,
        max_bytes=section.index_memory,
        is_adaptive=section.adaptive,
    )
