"""Choosing tokens, and finding out later which: results that are perhaps still on a device.

A forward pass of the next step may begin with tokens that the host does not know yet, so what is
chosen is told in two ways: as a tensor, at once, and on the host, to whoever waits. Knows neither
rows nor requests; a line is a row of logits.

Legend: R lines, n lines that are described, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from remora.engine.types import (
    NOT_FINITE,
    BoolArray,
    FloatArray,
    IntArray,
    LogprobRows,
    MaskWords,
    RowFault,
    TokenArray,
)

DoubleArray = npt.NDArray[np.float64]

NO_TOKEN_LEFT = RowFault("no token is left that may come next", of_request=True)


class SamplingKernels(Protocol):
    """The arithmetic of sampling; `kernels/sampling.py` says what each function means."""

    def greedy(self, logits: Tensor) -> tuple[TokenArray, BoolArray]:
        """Choose each row's greatest logit [R], and say which rows are good [R]."""
        ...

    def choose(
        self,
        logits: Tensor,
        temperature: FloatArray,
        uniforms: DoubleArray,
        *,
        top_k: TokenArray,
        top_p: DoubleArray,
        min_p: FloatArray,
    ) -> tuple[TokenArray, BoolArray]:
        """Choose one id per row [R], and say which rows are good [R]; may overwrite the logits."""
        ...

    def mask_tokens(self, logits: Tensor, lines: TokenArray, words: MaskWords) -> None:
        """Take -inf from logits of lines [G], in place, where their words' bits are 0."""
        ...

    def token_logprobs(
        self, logits: Tensor, token_ids: TokenArray, num_top: int
    ) -> tuple[FloatArray, IntArray, TokenArray, FloatArray]:
        """Return log-probabilities [R] and ranks [R] of tokens, ids and those of the likeliest."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """How a token is chosen in each line; arrays [R] as in `SamplingKernels.choose`.

    uniforms:  [R] in [0, 1)
    """

    temperature: FloatArray
    uniforms: DoubleArray
    top_k: TokenArray
    top_p: DoubleArray
    min_p: FloatArray


class TokenBatch(Protocol):
    """One token for each line."""

    @property
    def token_ids(self) -> Tensor:
        """The tokens [R] int64, where the logits are."""
        ...

    def take(self) -> tuple[TokenArray, dict[int, RowFault]]:
        """Wait for them; returns the tokens [R], and the lines that have none, with the reason."""
        ...


class SampledLogprobs(Protocol):
    """Log-probabilities of n tokens."""

    def take(self) -> LogprobRows:
        """Wait for them."""
        ...


class TokenSampler(Protocol):
    """What chooses and describes tokens.

    kernels:  by which it does, and by which prompts are described
    """

    kernels: SamplingKernels

    def choose(self, logits: Tensor, draws: Draws | None) -> TokenBatch:
        """Choose one token for each line of logits [R, V], which may be overwritten.

        draws:  None = the greatest of each
        """
        ...

    def describe(
        self, raw: Tensor, lines: TokenArray, chosen: TokenBatch, num_top: int
    ) -> SampledLogprobs:
        """Describe what was chosen in some lines [n], and the likeliest tokens there.

        raw:  [n, V] logits of these lines as they were; not to be changed until it is taken
        """
        ...


class HostTokenSampler:
    """Choosing that is done when it returns."""

    def __init__(self, kernels: SamplingKernels) -> None:
        self.kernels = kernels

    def choose(self, logits: Tensor, draws: Draws | None) -> TokenBatch:
        """Choose now; see `TokenSampler`."""
        if draws is None:
            token_ids, is_good = self.kernels.greedy(logits)
        else:
            token_ids, is_good = self.kernels.choose(
                logits,
                draws.temperature,
                draws.uniforms,
                top_k=draws.top_k,
                top_p=draws.top_p,
                min_p=draws.min_p,
            )
        faults = {} if is_good.all() else _faults(logits, is_good)
        return _Known(token_ids, faults)

    def describe(
        self, raw: Tensor, lines: TokenArray, chosen: TokenBatch, num_top: int
    ) -> SampledLogprobs:
        """Describe when it is taken; see `TokenSampler`."""
        return _PendingLogprobs(raw, chosen.take()[0][lines], num_top, self.kernels)


def describe(
    logits: Tensor, token_ids: TokenArray, num_top: int, kernels: SamplingKernels
) -> LogprobRows:
    """Describe tokens [n] by their raw logits [n, V]."""
    chosen, ranks, top_ids, top = kernels.token_logprobs(logits, token_ids, num_top)
    return LogprobRows(
        token_ids=token_ids, logprobs=chosen, ranks=ranks, top_ids=top_ids, top_logprobs=top
    )


@dataclass(frozen=True, slots=True)
class _Known:
    known: TokenArray
    faults: dict[int, RowFault]

    @property
    def token_ids(self) -> Tensor:
        return torch.from_numpy(self.known)

    def take(self) -> tuple[TokenArray, dict[int, RowFault]]:
        return self.known, self.faults


@dataclass(frozen=True, slots=True)
class _PendingLogprobs:
    raw: Tensor
    token_ids: TokenArray
    num_top: int
    kernels: SamplingKernels

    def take(self) -> LogprobRows:
        return describe(self.raw, self.token_ids, self.num_top, self.kernels)


def _faults(logits: Tensor, is_good: BoolArray) -> dict[int, RowFault]:
    """Say why lines have no token; logits [R, V] as they were when one was to be chosen."""
    return {
        line: NO_TOKEN_LEFT if bool((logits[line] == -torch.inf).all()) else NOT_FINITE
        for line in (~is_good).nonzero()[0].tolist()
    }
