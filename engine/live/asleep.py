"""The forward pass of an engine without weights."""

from __future__ import annotations

from torch import Tensor

from remora.configs.errors import EngineError
from remora.engine.runner.inputs import StepInputs

_REASON = "The engine has no weights: it sleeps."


class AsleepForward:
    """ForwardPass that no step may run on."""

    def forward(self, inputs: StepInputs) -> Tensor:
        """Raise EngineError."""
        raise EngineError(_REASON)

    def logits(self, first: int, last: int) -> Tensor:
        """Raise EngineError."""
        raise EngineError(_REASON)

    def hidden(self, first: int, last: int) -> Tensor:
        """Raise EngineError."""
        raise EngineError(_REASON)

    def close(self) -> None:
        """Do nothing."""
