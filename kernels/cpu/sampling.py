"""Native token sampling: `kernels/sampling.py` in one call for all rows.

Results differ from the torch code by rounding alone. A draw can differ only where the two least
times of its race are within about 1e-6 of each other, and a nucleus only where the mass up to its
boundary is that close to top_p.

Legend: R rows, V vocabulary, K of the top.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from remora.kernels.cpu.library import Team


class NativeSampling:
    """`SamplingKernels` on a thread team.

    Logits are float32 in CPU memory, each row contiguous. Only `mask_tokens` changes them.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._library = team.library

    def greedy(self, logits: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the id of each row's greatest logit; see `kernels/sampling.py`."""
        token_ids = np.empty(len(logits), np.int64)
        is_good = np.empty(len(logits), np.bool_)
        self._library.choose(
            *self._describe(logits), *[None] * 5, token_ids.ctypes.data, is_good.ctypes.data
        )
        return token_ids, is_good

    def choose(
        self,
        logits: Tensor,
        temperature: npt.NDArray[np.float32],
        keys: npt.NDArray[np.int64],
        *,
        top_k: npt.NDArray[np.int64],
        top_p: npt.NDArray[np.float64],
        min_p: npt.NDArray[np.float32],
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Sample one id per row; see `kernels/sampling.py`."""
        num_rows = len(logits)
        token_ids = np.empty(num_rows, np.int64)
        is_good = np.empty(num_rows, np.bool_)
        self._library.choose(
            *self._describe(logits),
            _address(temperature, np.float32, num_rows),
            _address(keys, np.int64, num_rows),
            _address(top_k, np.int64, num_rows),
            _address(top_p, np.float64, num_rows),
            _address(min_p, np.float32, num_rows),
            token_ids.ctypes.data,
            is_good.ctypes.data,
        )
        return token_ids, is_good

    def token_logprobs(
        self, logits: Tensor, token_ids: npt.NDArray[np.int64], num_top: int
    ) -> tuple[
        npt.NDArray[np.float32],
        npt.NDArray[np.int32],
        npt.NDArray[np.int64],
        npt.NDArray[np.float32],
    ]:
        """Return log-probabilities of chosen and top tokens; see `kernels/sampling.py`."""
        num_rows, num_top = len(logits), min(num_top, logits.shape[1])
        chosen = np.empty(num_rows, np.float32)
        ranks = np.empty(num_rows, np.int32)
        top_ids = np.empty((num_rows, num_top), np.int64)
        top = np.empty((num_rows, num_top), np.float32)
        self._library.token_logprobs(
            *self._describe(logits),
            _address(token_ids, np.int64, num_rows),
            num_top,
            chosen.ctypes.data,
            ranks.ctypes.data,
            top_ids.ctypes.data,
            top.ctypes.data,
        )
        return chosen, ranks, top_ids, top

    def mask_tokens(
        self, logits: Tensor, lines: npt.NDArray[np.int64], words: npt.NDArray[np.int32]
    ) -> None:
        """Set disallowed logits to -inf, in place; see `kernels/grammar_mask.py`."""
        team, address, stride, num_rows, vocab_size = self._describe(logits)
        if not len(lines):
            return
        if not 0 <= lines.min() <= lines.max() < num_rows:
            raise IndexError(f"lines {lines} are outside of {num_rows} rows of logits")
        num_words = -(-vocab_size // 32)
        if words.shape != (len(lines), num_words) or not words.flags.c_contiguous:
            raise TypeError(f"expected [{len(lines)}, {num_words}] words, got {words.shape}")
        self._library.mask_tokens(
            team,
            address,
            stride,
            len(lines),
            vocab_size,
            _address(lines, np.int64, len(lines)),
            _address(words.reshape(-1), np.int32, words.size),
        )

    def _describe(self, logits: Tensor) -> tuple[int, int, int, int, int]:
        if logits.dtype != torch.float32 or not logits.is_cpu or logits.stride(1) != 1:
            raise TypeError(
                f"expected float32 logits in CPU memory with contiguous rows; got "
                f"{logits.dtype} on {logits.device} with strides {logits.stride()}"
            )
        num_rows, vocab_size = logits.shape
        return self._team.pointer, logits.data_ptr(), logits.stride(0), num_rows, vocab_size


def _address(values: npt.NDArray[np.generic], dtype: type[np.generic], num_rows: int) -> int:
    """Return the address of an array of one number per row, after checking type and shape."""
    if values.dtype != dtype or values.shape != (num_rows,) or not values.flags.c_contiguous:
        raise TypeError(f"expected {num_rows} {dtype.__name__}, got {values.shape} {values.dtype}")
    return values.ctypes.data
