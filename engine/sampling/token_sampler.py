"""Samples tokens from logits, with results that may still be on a device.

The next forward pass may begin with tokens that the host does not know yet, so sampled tokens are
available as a tensor at once, and on the host after `take`. Knows neither rows nor requests; a line
is a row of logits.

Legend: R lines, n lines with log-probabilities, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from remora.engine.types import (
    NO_TOKEN_LEFT,
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


class SamplingKernels(Protocol):
    """The arithmetic of sampling; `kernels/sampling.py` documents each function."""

    def greedy(self, logits: Tensor) -> tuple[TokenArray, BoolArray]:
        """Choose each row's greatest logit [R]; also returns which rows are good [R]."""

    def choose(
        self,
        logits: Tensor,
        temperature: FloatArray,
        keys: TokenArray,
        *,
        top_k: TokenArray,
        top_p: DoubleArray,
        min_p: FloatArray,
    ) -> tuple[TokenArray, BoolArray]:
        """Choose one id per row [R]; also returns which are good [R]. May change the logits."""

    def mask_tokens(self, logits: Tensor, lines: TokenArray, words: MaskWords) -> None:
        """Set logits of lines [G] to -inf, in place, where their words' bits are 0."""

    def token_logprobs(
        self, logits: Tensor, token_ids: TokenArray, num_top: int
    ) -> tuple[FloatArray, IntArray, TokenArray, FloatArray]:
        """Return log-probabilities [R] and ranks [R] of tokens, then top ids and their logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Draw parameters of each line; arrays [R] as in `SamplingKernels.choose`.

    keys:  [R] random bits of each line's position
    """

    temperature: FloatArray
    keys: TokenArray
    top_k: TokenArray
    top_p: DoubleArray
    min_p: FloatArray


class SampledTokens(Protocol):
    """One token for each line."""

    @property
    def token_ids(self) -> Tensor:
        """The tokens [R] int64, on the device of the logits."""

    def take(self) -> tuple[TokenArray, dict[int, RowFault]]:
        """Wait; returns the tokens [R], and the faults of lines that have none."""


class SampledLogprobs(Protocol):
    """Log-probabilities of n tokens."""

    def take(self) -> LogprobRows:
        """Wait, and return them."""


class TokenSampler(Protocol):
    """Samples tokens and computes their log-probabilities.

    kernels:  the arithmetic, also for prompt log-probabilities
    """

    kernels: SamplingKernels

    def prepare(self, draws: Draws | None, *, is_plain: bool) -> None:
        """Announce the parameters of the next `choose`, before the forward pass of its logits.

        is_plain:  whether these logits will be neither edited nor described
        """

    def choose(self, logits: Tensor, draws: Draws | None) -> SampledTokens:
        """Choose one token for each line of logits [R, V], which may be overwritten.

        draws:  None = the greatest logit of each line
        """

    def guess(self, logits: Tensor, draws: Draws | None) -> Tensor:
        """Return what `choose` would choose, [R] int64, without waiting for it or copying it.

        Valid until the next forward pass; logits that are not finite give any token.
        """

    def describe(
        self,
        raw: Tensor,
        lines: TokenArray,
        chosen: SampledTokens,
        num_top: int,
        asked: tuple[int, ...] = (),
    ) -> SampledLogprobs:
        """Return log-probabilities of the tokens chosen in lines [n], and of the likeliest.

        raw:    [n, V] unedited logits of these lines, which must not change before `take`
        asked:  ids of further tokens
        """


class HostTokenSampler:
    """TokenSampler on the host, which waits for its results."""

    def __init__(self, kernels: SamplingKernels) -> None:
        self.kernels = kernels

    def prepare(self, draws: Draws | None, *, is_plain: bool) -> None:
        """Do nothing: the parameters are on the host already."""

    def choose(self, logits: Tensor, draws: Draws | None) -> SampledTokens:
        """Choose at once; see `TokenSampler`."""
        token_ids, is_good = self._chosen(logits, draws)
        faults = {} if is_good.all() else _faults(logits, is_good)
        return _HostTokens(token_ids, faults)

    def guess(self, logits: Tensor, draws: Draws | None) -> Tensor:
        """Choose at once; see `TokenSampler`."""
        token_ids, _ = self._chosen(logits, draws)
        return torch.from_numpy(token_ids.clip(0, logits.shape[1] - 1))

    def describe(
        self,
        raw: Tensor,
        lines: TokenArray,
        chosen: SampledTokens,
        num_top: int,
        asked: tuple[int, ...] = (),
    ) -> SampledLogprobs:
        """Compute when taken; see `TokenSampler`."""
        return _HostLogprobs(raw, chosen.take()[0][lines], num_top, self.kernels, asked)

    def _chosen(self, logits: Tensor, draws: Draws | None) -> tuple[TokenArray, BoolArray]:
        """Return one id per line [R], and which are good [R]."""
        if draws is None:
            return self.kernels.greedy(logits)
        return self.kernels.choose(
            logits,
            draws.temperature,
            draws.keys,
            top_k=draws.top_k,
            top_p=draws.top_p,
            min_p=draws.min_p,
        )


def describe(
    logits: Tensor,
    token_ids: TokenArray,
    num_top: int,
    kernels: SamplingKernels,
    asked: tuple[int, ...] = (),
) -> LogprobRows:
    """Return the log-probabilities of tokens [n] from their raw logits [n, V].

    asked:  ids of further tokens
    """
    chosen, ranks, top_ids, top = kernels.token_logprobs(logits, token_ids, num_top)
    rows = LogprobRows(
        token_ids=token_ids, logprobs=chosen, ranks=ranks, top_ids=top_ids, top_logprobs=top
    )
    if not asked:
        return rows
    own = torch.from_numpy(token_ids).to(logits.device)
    base = torch.from_numpy(chosen).to(logits.device)
    found = asked_logprobs(logits, own, base, torch.tensor(asked, device=logits.device))
    return replace(
        rows,
        asked_ids=np.tile(np.array(asked, np.int64), (len(token_ids), 1)),
        asked_logprobs=found.cpu().numpy(),
    )


def asked_logprobs(logits: Tensor, token_ids: Tensor, known: Tensor, asked: Tensor) -> Tensor:
    """Return the log-probabilities [n, m] of ids [m] in lines of raw logits [n, V].

    token_ids, known:  [n] a token of each line, and its log-probability: that of another differs
                       from it as the logits do, so the lines need not be summed again
    """
    own = logits.gather(1, token_ids[:, None])
    return logits.index_select(1, asked).float() - own.float() + known[:, None]


@dataclass(frozen=True, slots=True)
class _HostTokens:
    known: TokenArray
    faults: dict[int, RowFault]

    @property
    def token_ids(self) -> Tensor:
        return torch.from_numpy(self.known)

    def take(self) -> tuple[TokenArray, dict[int, RowFault]]:
        return self.known, self.faults


@dataclass(frozen=True, slots=True)
class _HostLogprobs:
    raw: Tensor
    token_ids: TokenArray
    num_top: int
    kernels: SamplingKernels
    asked: tuple[int, ...]

    def take(self) -> LogprobRows:
        return describe(self.raw, self.token_ids, self.num_top, self.kernels, self.asked)


def _faults(logits: Tensor, is_good: BoolArray) -> dict[int, RowFault]:
    """Return why lines have no token, from the logits [R, V] that were sampled."""
    return {
        line: NO_TOKEN_LEFT if bool((logits[line] == -torch.inf).all()) else NOT_FINITE
        for line in (~is_good).nonzero()[0].tolist()
    }
