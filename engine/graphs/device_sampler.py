"""Samples tokens on an asynchronous device; the host waits only when it reads them.

Knows neither rows nor requests. `kernels/sampling.py` defines which token is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from remora.engine.graphs.device_stream import DeviceStream, Fetch, Readback
from remora.engine.graphs.staging import Shape, Staging, room_for
from remora.engine.graphs.step_sampling import StepSampling, draw_arrays
from remora.engine.sampling.token_sampler import (
    Draws,
    SampledLogprobs,
    SampledTokens,
    SamplingKernels,
    asked_logprobs,
)
from remora.engine.types import (
    LOGPROB_FIELDS,
    NO_TOKEN_LEFT,
    NOT_FINITE,
    LogprobRows,
    RowFault,
    TokenArray,
)
from remora.kernels import sampling as sampling_kernels
from remora.kernels.device_sampling import choose_on_device, token_logprobs_on_device

FAULTS = {
    sampling_kernels.NOT_FINITE: NOT_FINITE,
    sampling_kernels.ALL_BANNED: NO_TOKEN_LEFT,
}


class DeviceTokenSampler:
    """TokenSampler for steps of at most `max_lines` lines of logits."""

    kernels: SamplingKernels = sampling_kernels

    def __init__(self, stream: DeviceStream, max_lines: int, step: StepSampling | None) -> None:
        """Begin without parameters.

        step:  of the forward pass: parameters ride with its uploads, and its graphs may choose
        """
        greedy = draw_arrays(None, max_lines)
        shapes = [*map(Shape.of, greedy)]
        self._greedy = [each.clone() for each in Staging(stream, room_for(shapes)).upload(greedy)]
        self._draws = Staging(stream, room_for(shapes))
        self._lines = Staging(stream, room_for([Shape((max_lines,), np.dtype(np.int64))]))
        self._readback = Readback(stream)
        self._step = step
        self._prepared: Draws | None = None

    def prepare(self, draws: Draws | None, *, is_plain: bool) -> None:
        """Let the forward pass upload the parameters; see `TokenSampler`."""
        if self._step is not None:
            self._prepared = draws
            self._step.prepare(draws, is_plain=is_plain)

    @torch.inference_mode()
    def choose(self, logits: Tensor, draws: Draws | None) -> SampledTokens:
        """Launch the kernels, unless the step's graph has run them; see `TokenSampler`."""
        token_ids, chosen = self._chosen(logits, draws)
        return _DeviceTokens(token_ids, self._readback.start([chosen]))

    @torch.inference_mode()
    def guess(self, logits: Tensor, draws: Draws | None) -> Tensor:
        """Launch the kernels, unless the step's graph has run them; see `TokenSampler`."""
        token_ids, _ = self._chosen(logits, draws)
        return token_ids

    def _chosen(self, logits: Tensor, draws: Draws | None) -> tuple[Tensor, Tensor]:
        """Return token ids [R], and these and faults together [2, at least R]."""
        num_lines = len(logits)
        if self._step is not None and (chosen := self._step.chosen(logits)) is not None:
            assert self._step.tokens is not None, "the graph has chosen them"
            return self._step.tokens, chosen
        temperature, keys, top_k, top_p, min_p = self._on_device(draws, num_lines)
        chosen = choose_on_device(logits, temperature, keys, top_k=top_k, top_p=top_p, min_p=min_p)
        return chosen[0], chosen

    def _on_device(self, draws: Draws | None, num_lines: int) -> list[Tensor]:
        """Return the parameters of lines; those of greedy lines never change."""
        if draws is None:
            return [each[:num_lines] for each in self._greedy]
        if self._step is not None and draws is self._prepared:
            return self._step.arrived()
        return self._draws.upload(draw_arrays(draws, num_lines))

    @torch.inference_mode()
    def describe(
        self,
        raw: Tensor,
        lines: TokenArray,
        chosen: SampledTokens,
        num_top: int,
        asked: tuple[int, ...] = (),
    ) -> SampledLogprobs:
        """Launch the kernels; see `TokenSampler`."""
        (index,) = self._lines.upload([lines.astype(np.int64)])
        token_ids = chosen.token_ids.index_select(0, index)
        made = [*token_logprobs_on_device(raw, token_ids, num_top)]
        if asked:
            ids = torch.tensor(asked, device=raw.device)
            found = asked_logprobs(raw, token_ids, made[0], ids)
            made += [ids.expand(len(raw), -1).contiguous(), found]
        return _DeviceLogprobs(self._readback.start([token_ids, *made]))


@dataclass(frozen=True, slots=True)
class _DeviceTokens:
    """Tokens [R] whose ids and faults [2, at least R] arrive together."""

    token_ids: Tensor
    fetch: Fetch

    def take(self) -> tuple[TokenArray, dict[int, RowFault]]:
        (chosen,) = self.fetch()
        token_ids, faults = chosen[:, : len(self.token_ids)]
        return token_ids, {line: FAULTS[int(faults[line])] for line in faults.nonzero()[0].tolist()}


@dataclass(frozen=True, slots=True)
class _DeviceLogprobs:
    fetch: Fetch

    def take(self) -> LogprobRows:
        return LogprobRows(**dict(zip(LOGPROB_FIELDS, self.fetch(), strict=False)))
