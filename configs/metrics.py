"""Counters, traces, logs: the section `metrics` of a configuration. What is logged: `logs.py`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from remora.configs.fields import Seconds
from remora.configs.logs import LogKeys


class MetricsSection(LogKeys):
    """Counters, traces, logs."""

    max_step_records: Annotated[int, Field(ge=0, le=2**20)] = 0
    """Latest steps of the engine that the administrative route /step_records shows. 0 = none."""

    step_records_s: Seconds = 60.0
    """Seconds after which a step is shown there no longer."""
