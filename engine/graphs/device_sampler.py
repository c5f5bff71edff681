"""Samples tokens on an asynchronous device; the host waits only when it reads them.

Knows neither rows nor requests. `kernels/sampling.py` defines which token is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from remora.engine.graphs.device_stream import DeviceStream, Fetch, Readback
from remora.engine.graphs.staging import Shape, Staging, room_for
from remora.engine.sampling.token_sampler import (
    NO_TOKEN_LEFT,
    Draws,
    SampledLogprobs,
    SampledTokens,
    SamplingKernels,
)
from remora.engine.types import NOT_FINITE, LogprobRows, RowFault, TokenArray
from remora.kernels import sampling as sampling_kernels
from remora.kernels.device_sampling import choose_on_device, token_logprobs_on_device


class DeviceTokenSampler:
    """TokenSampler for steps of at most `max_rows` lines."""

    kernels: SamplingKernels = sampling_kernels

    def __init__(self, stream: DeviceStream, max_rows: int, staging: Staging | None = None) -> None:
        """Begin without parameters.

        staging:  the forward pass's, with whose uploads parameters ride
        """
        greedy = _arrays(None, max_rows)
        shapes = [*map(Shape.of, greedy)]
        self._greedy = [each.clone() for each in Staging(stream, room_for(shapes)).upload(greedy)]
        self._draws = Staging(stream, room_for(shapes))
        self._lines = Staging(stream, room_for([Shape((max_rows,), np.dtype(np.int64))]))
        self._readback = Readback(stream)
        self._step_staging = staging
        self._prepared: Draws | None = None

    def prepare(self, draws: Draws | None) -> None:
        """Let the parameters ride with the forward pass's upload; see `TokenSampler`."""
        if self._step_staging is not None:
            self._prepared = draws
            self._step_staging.ride([] if draws is None else _arrays(draws, 0))

    @torch.inference_mode()
    def choose(self, logits: Tensor, draws: Draws | None) -> SampledTokens:
        """Launch the kernels; see `TokenSampler`."""
        is_empty = logits.amax(1).isneginf()
        temperature, uniforms, top_k, top_p, min_p = self._on_device(draws, len(logits))
        token_ids, is_good = choose_on_device(
            logits, temperature, uniforms, top_k=top_k, top_p=top_p, min_p=min_p
        )
        return _DeviceTokens(token_ids, self._readback.start([token_ids, is_good, is_empty]))

    def _on_device(self, draws: Draws | None, num_lines: int) -> list[Tensor]:
        """Return the parameters of lines; those of greedy lines never change."""
        if draws is None:
            return [each[:num_lines] for each in self._greedy]
        if self._step_staging is not None and draws is self._prepared:
            return self._step_staging.arrived()
        return self._draws.upload(_arrays(draws, num_lines))

    @torch.inference_mode()
    def describe(
        self, raw: Tensor, lines: TokenArray, chosen: SampledTokens, num_top: int
    ) -> SampledLogprobs:
        """Launch the kernels; see `TokenSampler`."""
        (index,) = self._lines.upload([lines.astype(np.int64)])
        token_ids = chosen.token_ids.index_select(0, index)
        made = token_logprobs_on_device(raw, token_ids, num_top)
        return _DeviceLogprobs(self._readback.start([token_ids, *made]))


@dataclass(frozen=True, slots=True)
class _DeviceTokens:
    token_ids: Tensor
    fetch: Fetch

    def take(self) -> tuple[TokenArray, dict[int, RowFault]]:
        token_ids, is_good, is_empty = self.fetch()
        return token_ids, {
            line: NO_TOKEN_LEFT if is_empty[line] else NOT_FINITE
            for line in (~is_good).nonzero()[0].tolist()
        }


@dataclass(frozen=True, slots=True)
class _DeviceLogprobs:
    fetch: Fetch

    def take(self) -> LogprobRows:
        names = ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs")
        return LogprobRows(**dict(zip(names, self.fetch(), strict=True)))


def _arrays(draws: Draws | None, num_lines: int) -> list[npt.NDArray[Any]]:
    """Return the arrays to upload; without draws, arrays for the greatest logits."""
    if draws is None:
        return [
            np.zeros(num_lines, np.float32),
            np.zeros(num_lines, np.float64),
            np.zeros(num_lines, np.int64),
            np.ones(num_lines, np.float64),
            np.zeros(num_lines, np.float32),
        ]
    return [draws.temperature, draws.uniforms, draws.top_k, draws.top_p, draws.min_p]
