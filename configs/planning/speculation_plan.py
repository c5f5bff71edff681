"""Where rows may have drafts. Pure functions; knows no engine."""

from __future__ import annotations

from remora.configs.errors import ConfigError
from remora.configs.schema import ServeConfig


def plan_drafts(config: ServeConfig, device: str, *, overlap: bool) -> int:
    """Return the most drafts of a row in one step; 0 = no speculation.

    overlap:  whether steps are planned before the tokens of the step before are known
    Raises ConfigError where rows cannot have drafts.
    """
    section = config.speculation
    if section.method == "none":
        return 0
    for refused, why in (
        (device != "cpu", f"runs on the CPU only, and the model runs on {device}"),
        (overlap, "does not work while steps overlap (engine.overlap)"),
        (config.parallel.num_ranks > 1, "does not run on several ranks yet"),
    ):
        if refused:
            raise ConfigError(f"speculation.method = {section.method} {why}; set it to none")
    return section.max_drafts
