"""SGLang's options for request priorities: a switch, and a preemption threshold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from remora.configs.dialects.rules import UNSAID, Effect, Harmless, Settings

_THRESHOLD = 10  # SGLang's default


def of_switch(value: bool, given: Mapping[str, Any]) -> Settings:
    """Translate the switch, which in SGLang also enables preemption by the threshold."""
    if not value:
        return {"engine.use_priorities": False}
    gap = max(0, given.get("--priority-scheduling-preemption-threshold", _THRESHOLD) - 1)
    return {"engine.use_priorities": True, "engine.priority_preemption_gap": gap}


def to_switch(settings: Settings) -> Any:
    """Return on if there is a preemption gap, off if priorities do not count."""
    if settings.get("engine.priority_preemption_gap") is not None:
        return settings.get("engine.use_priorities", True)
    return False if settings.get("engine.use_priorities") is False else UNSAID


def of_threshold(value: int, given: Mapping[str, Any]) -> Effect | Harmless:
    """Translate the threshold: SGLang preempts at the threshold, remora above the gap."""
    if not given.get("--enable-priority-scheduling"):
        return Harmless("it has no effect without --enable-priority-scheduling")
    how = "" if value >= 1 else "an equal priority never preempts"
    return Effect({"engine.priority_preemption_gap": max(0, value - 1)}, how)


def to_threshold(settings: Settings) -> Any:
    """Return SGLang's threshold: the gap plus 1."""
    gap = settings.get("engine.priority_preemption_gap")
    return UNSAID if gap is None else gap + 1
