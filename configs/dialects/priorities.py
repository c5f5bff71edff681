"""Priorities of requests as SGLang's options say them: a switch, and a threshold of preemption."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.configs.dialects.rules import UNSAID, Effect, Harmless, Settings

_THRESHOLD = 10  # their default


def of_switch(value: bool, given: Mapping[str, Any]) -> Settings:
    """Theirs preempts too, unless a threshold says otherwise from one of 10 on."""
    if not value:
        return {"engine.use_priorities": False}
    gap = max(0, given.get("--priority-scheduling-preemption-threshold", _THRESHOLD) - 1)
    return {"engine.use_priorities": True, "engine.priority_preemption_gap": gap}


def to_switch(settings: Settings) -> Any:
    """Return on where something is preempted, off where priorities do not count."""
    if settings.get("engine.priority_preemption_gap") is not None:
        return settings.get("engine.use_priorities", True)
    return False if settings.get("engine.use_priorities") is False else UNSAID


def of_threshold(value: int, given: Mapping[str, Any]) -> Effect | Harmless:
    """Theirs preempts from the threshold on, ours beyond the gap."""
    if not given.get("--enable-priority-scheduling"):
        return Harmless("it counts only with --enable-priority-scheduling")
    how = "" if value >= 1 else "an equal priority never preempts"
    return Effect({"engine.priority_preemption_gap": max(0, value - 1)}, how)


def to_threshold(settings: Settings) -> Any:
    """Return theirs: one more than ours."""
    gap = settings.get("engine.priority_preemption_gap")
    return UNSAID if gap is None else gap + 1
