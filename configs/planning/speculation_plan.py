"""How rows get drafts, and what must hold for it. Pure functions; knows no engine."""

from __future__ import annotations

from dataclasses import dataclass

from remora.configs.errors import ConfigError


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


def check_speculation(*, device: str, overlap: bool) -> None:
    """Raise ConfigError where rows cannot have drafts.

    overlap:  whether steps are planned before the tokens of the step before are known
    """
    if device != "cpu":
        raise ConfigError(
            f"speculation works on the CPU only, and the model runs on {device}: leave the section "
            "speculation out"
        )
    if overlap:
        raise ConfigError(
            "speculation does not work while steps overlap (engine.overlap): leave one of them out"
        )
