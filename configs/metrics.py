"""Counters, traces, logs: the section `metrics` of a configuration."""

from __future__ import annotations

from typing import Literal

from remora.configs.fields import Section


class MetricsSection(Section):
    """Counters, traces, logs."""

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] | None = None
    """Least important of our lines in a replica's log. Default: that of Serve's logging_config."""
