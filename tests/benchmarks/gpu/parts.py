"""The parts of a run, their stages, and the seconds of each.

What a stage leaves of its time goes to the next. A part takes at most `PART_S`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

PART_S = 470.0
CPU_PART_S = 170.0
MODELS = ("llama-3.1-8b", "qwen3-0.6b", "qwen3-30b-a3b")


@dataclass(frozen=True, slots=True)
class Stage:
    """Cases of `stages/<module>.py`, which run in processes of their own.

    seconds:  of all cases together
    options:  of the setting
    """

    module: str
    seconds: float
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The module, and the options' values."""
        return " ".join([self.module, *map(str, self.options.values())])


PARTS: dict[str, tuple[Stage, ...]] = {
    "a": (
        Stage("ceilings", 25),
        Stage("engine", 110, {"model": "llama-3.1-8b"}),
        Stage("correctness", 140),
        Stage("logits", 60, {"model": "llama-3.1-8b"}),
        Stage("unit_tests", 130),
    ),
    "b": (
        Stage("ceilings", 15, {"only": "bounds"}),
        *(
            Stage("serving", seconds, {"model": model})
            for model, seconds in (
                ("llama-3.1-8b", 105.0),
                ("qwen3-30b-a3b", 110.0),
                ("qwen3-0.6b", 60.0),
            )
        ),
        Stage("peers", 50, {"model": "llama-3.1-8b"}),
        Stage("kernels", 125, {"family": "all"}),
    ),
    "c": (
        Stage("ceilings", 15, {"only": "bounds"}),
        Stage("kernels", 90, {"family": "quantised"}),
        Stage("kernels", 40, {"family": "lora"}),
        Stage("sweeps", 210),
        Stage("sanitizer", 110),
    ),
}
