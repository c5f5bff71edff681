"""How rows get drafts, and what must hold for it. Pure functions; knows no engine."""

from __future__ import annotations

from dataclasses import dataclass

from remora.configs.errors import ConfigError
from remora.configs.schema import ServeConfig


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


def plan_speculation(config: ServeConfig, device: str, *, overlap: bool) -> SpeculationPlan | None:
    """Return how rows get drafts; None = not at all.

    overlap:  whether steps are planned before the tokens of the step before are known
    Raises ConfigError where rows cannot have drafts.
    """
    section, num_ranks = config.speculation, config.parallel.num_ranks
    if section.method == "none":
        return None
    for is_so, why in (
        (device != "cpu", f"works on the CPU only, and the model runs on {device}"),
        (num_ranks > 1, f"works on one rank, and the model runs on {num_ranks}"),
        (overlap, "does not work while steps overlap (engine.overlap)"),
    ):
        if is_so:
            raise ConfigError(f"speculation {why}: leave the section speculation out")
    return SpeculationPlan(
        max_drafts=section.max_drafts,
        shortest=section.shortest_suffix,
        longest=section.longest_suffix,
        max_bytes=section.index_memory,
        is_adaptive=section.adaptive,
    )
