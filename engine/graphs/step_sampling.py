"""Chooses a step's tokens within its captured graph, where its rows need nothing after the logits.

Draw parameters travel with the step's upload. A captured decode step reads them at fixed addresses,
and skips all rows if tokens are chosen after the graph: because logits are edited or described, or
because the step did not fit a graph. Knows neither rows nor requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from remora.engine.graphs.staging import PaddedArrays, Shape, Staging
from remora.engine.sampling.token_sampler import Draws
from remora.kernels.device_sampling import SKIPPED, choose_on_device

NUM_PARAMS = 5  # arrays of a step's draws
_DTYPES = (np.float32, np.int64, np.int64, np.float64, np.float32)
_OFF = (SKIPPED, 0, 0, 1, 0)  # of rows without a token


class StepSampling:
    """Draw parameters of the next step, and the tokens that a graph chose for the latest.

    tokens:        [R] int64 of the latest step; None = its graph chose none
    num_captured:  steps whose tokens were chosen in a graph
    num_launched:  steps whose tokens were chosen after the forward pass
    """

    def __init__(self, staging: Staging) -> None:
        """Begin without a step.

        staging:  of the step's one upload
        """
        self.tokens: Tensor | None = None
        self.num_captured = 0
        self.num_launched = 0
        self._staging = staging
        self._draws: Draws | None = None
        self._is_plain = False
        self._is_captured = False
        self._made: tuple[Tensor, Tensor] | None = None

    def prepare(self, draws: Draws | None, *, is_plain: bool) -> None:
        """Take the draws of the next step; see `TokenSampler`."""
        self._draws, self._is_plain = draws, is_plain
        self._staging.ride([] if draws is None else draw_arrays(draws, 0))

    def arrived(self) -> list[Tensor]:
        """Return the draw parameters that the latest step uploaded for tokens after its graph."""
        return self._staging.arrived()

    def begin(self, num_rows: int | None) -> PaddedArrays:
        """Return the draw parameters of a captured step, with the values of padding.

        num_rows:  of the step, if all have logits; None otherwise
        """
        self._is_captured = self._is_plain and num_rows is not None
        if num_rows is None or not self._is_captured:
            return [(np.empty(0, dtype), off) for dtype, off in zip(_DTYPES, _OFF, strict=True)]
        self._staging.ride([])
        return list(zip(draw_arrays(self._draws, num_rows), _OFF, strict=True))

    def end(self, logits: Tensor, chosen: Tensor | None) -> None:
        """Note what the step's forward pass made.

        chosen:  what its graph chose, [2, size] as by `choose_on_device`; None = there is no graph
        """
        self._made = self.tokens = None
        if chosen is not None and self._is_captured:
            self._made, self.tokens = (logits, chosen), chosen[0, : len(logits)]
        self._is_plain = self._is_captured = False

    def chosen(self, logits: Tensor) -> Tensor | None:
        """Return what a graph chose from the logits of the latest step, [2, size]; None = nothing.

        logits:  that `end` was given
        """
        if self._made is None or self._made[0] is not logits:
            self.num_launched += 1
            return None
        self.num_captured += 1
        return self._made[1]


def choose_in_graph(logits: Tensor, params: list[Tensor]) -> Tensor:
    """Choose tokens [2, size] from a captured step's logits and uploaded draw parameters."""
    temperature, keys, top_k, top_p, min_p = params
    return choose_on_device(logits, temperature, keys, top_k=top_k, top_p=top_p, min_p=min_p)


def draw_shapes(size: int) -> list[Shape]:
    """Return the shapes of the draw parameters of `size` rows."""
    return [Shape((size,), np.dtype(dtype)) for dtype in _DTYPES]


def draw_arrays(draws: Draws | None, num_rows: int) -> list[npt.NDArray[Any]]:
    """Return the arrays to upload; without draws, arrays for the greatest logits."""
    if draws is None:
        greedy = (0, *_OFF[1:])
        return [np.full(num_rows, off, dtype) for dtype, off in zip(_DTYPES, greedy, strict=True)]
    return [draws.temperature, draws.keys, draws.top_k, draws.top_p, draws.min_p]
