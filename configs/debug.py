"""Looking inside a running server: the section `debug` of a configuration."""

from __future__ import annotations

from remora.configs.fields import Section


class DebugSection(Section):
    """Looking inside: checks of numbers, dumps, profiles. All off by default."""

    log_step_times: bool = False
    """Whether a line is logged for each step that says what it computed and where its time went."""
