"""Changes to single logits of a row: bias, penalties, bans.

Bans cover end-of-sequence and stop ids until min_tokens is reached, and the token that would
complete a run of bad words. Edits are short lists of token ids per row, so a step touches the few
logits that change and not the vocabulary. Knows nothing of temperature, seeds or drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from remora.engine.types import FloatArray, RowInit, TokenArray
from remora.kernels import sampling as kernels
from remora.kernels.memory import to_device

# Beyond these, float32 overflows later on, while the outcome no longer changes.
MAX_BIAS, MIN_REPETITION = 1e9, 1e-6


class TokenCounts:
    """Distinct tokens of one row, and how often each occurs in its output."""

    def __init__(self, token_ids: TokenArray, num_prompt_tokens: int) -> None:
        distinct = np.unique(token_ids)
        self._places = {token_id: place for place, token_id in enumerate(distinct.tolist())}
        self._ids = np.concatenate([distinct, np.zeros(64, np.int64)])
        self._counts = np.zeros(len(self._ids), np.float32)
        for token_id in token_ids[num_prompt_tokens:].tolist():
            self.add(token_id)

    @property
    def ids(self) -> TokenArray:
        """Distinct tokens [N] of prompt and output."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> FloatArray:
        """Occurrences [N] of `ids` in the output."""
        return self._counts[: len(self._places)]

    def copy(self) -> TokenCounts:
        """Return counts that change on their own."""
        made = copy(self)
        made._places, made._ids = self._places.copy(), self._ids.copy()
        made._counts = self._counts.copy()
        return made

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(place, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(place, np.float32)])
        self._ids[place] = token_id
        self._counts[place] += 1


class BadWords:
    """Runs of tokens that one row must not complete, and its latest output."""

    def __init__(self, runs: Sequence[tuple[int, ...]], output_ids: TokenArray) -> None:
        self._always = [run[0] for run in runs if len(run) == 1]
        self._longest = max(map(len, runs), default=0) - 1
        self._by_last: dict[int, list[tuple[int, ...]]] = {}
        for run in runs:
            if len(run) > 1:
                self._by_last.setdefault(run[-2], []).append(run)
        self._recent: list[int] = []
        for token_id in output_ids.tolist():
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Append an output token."""
        self._recent = [*self._recent, token_id][-self._longest :] if self._longest else []

    def next_ids(self) -> list[int]:
        """Return the tokens that would complete a run."""
        if not self._recent:
            return self._always
        recent = tuple(self._recent)
        return self._always + [
            run[-1]
            for run in self._by_last.get(recent[-1], ())
            if recent[1 - len(run) :] == run[:-1]
        ]


class RowEdits:
    """The edits of one row, built from its known tokens and updated with each new one."""

    def __init__(self, init: RowInit, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        sampling = init.sampling
        bias = np.fromiter(sampling.logit_bias.values(), np.float64, len(sampling.logit_bias))
        self.bias = bias.clip(-MAX_BIAS, MAX_BIAS).astype(np.float32)
        self.bias_ids = np.fromiter(sampling.logit_bias, np.int64, len(sampling.logit_bias))
        stops = np.unique(np.array([*eos_token_ids, *sampling.stop_token_ids], np.int64))
        self.stop_ids = stops[stops < vocab_size]
        self.num_missing = sampling.min_tokens - (len(init.token_ids) - init.num_prompt_tokens)
        self.penalties = (
            max(sampling.repetition_penalty, MIN_REPETITION),
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        self.counts: TokenCounts | None = None
        if self.penalties != (1.0, 0.0, 0.0):
            self.counts = TokenCounts(init.token_ids, init.num_prompt_tokens)
        self.bad_words: BadWords | None = None
        if sampling.bad_words_ids:
            outputs = init.token_ids[init.num_prompt_tokens :]
            self.bad_words = BadWords(sampling.bad_words_ids, outputs)

    @property
    def is_needed(self) -> bool:
        """Whether this step or a later one changes the row's logits."""
        return (
            len(self.bias_ids) > 0
            or self.num_missing > 0
            or self.counts is not None
            or self.bad_words is not None
        )

    @property
    def banned_ids(self) -> TokenArray:
        """Tokens that are banned next, each once."""
        stops = self.stop_ids if self.num_missing > 0 else self.stop_ids[:0]
        if self.bad_words is None:
            return stops
        return np.union1d(stops, np.array(self.bad_words.next_ids(), np.int64))

    def after(self, token_id: int) -> RowEdits:
        """Return the edits after one more output token; these stay as they are."""
        made = copy(self)
        made.counts = None if self.counts is None else self.counts.copy()
        made.bad_words = copy(self.bad_words)
        made.add_token(token_id)
        return made

    def add_token(self, token_id: int) -> None:
        """Append an output token."""
        self.num_missing -= 1
        if self.counts is not None:
            self.counts.add(token_id)
        if self.bad_words is not None:
            self.bad_words.add(token_id)


def apply_edits(
    logits: Tensor,
    edited: Sequence[tuple[int, RowEdits]],
    *,
    unbanned: frozenset[int] = frozenset(),
) -> None:
    """Apply, in place and in this order, bias, penalties and bans to lines of logits [R, V].

    unbanned:  lines to which no ban applies
    """
    biased = [(line, edits) for line, edits in edited if len(edits.bias_ids)]
    if biased:
        lines, ids = _places(logits, [(line, edits.bias_ids) for line, edits in biased])
        values = np.concatenate([edits.bias for _, edits in biased])
        kernels.add_at(logits, lines, ids, to_device(values, logits.device))
    _penalize(logits, edited)
    bans = [(line, edits.banned_ids) for line, edits in edited if line not in unbanned]
    banned = [(line, ids) for line, ids in bans if len(ids)]
    if banned:
        lines, ids = _places(logits, banned)
        kernels.add_at(logits, lines, ids, logits.new_full((len(ids),), -torch.inf))


def _penalize(logits: Tensor, edited: Sequence[tuple[int, RowEdits]]) -> None:
    counted = [(line, edits, edits.counts) for line, edits in edited if edits.counts is not None]
    if not counted:
        return
    lines, ids = _places(logits, [(line, counts.ids) for line, _, counts in counted])
    sizes = [len(counts.ids) for _, _, counts in counted]
    penalties = np.array([edits.penalties for _, edits, _ in counted], np.float32)
    repetition, presence, frequency = (
        to_device(np.repeat(column, sizes), logits.device) for column in penalties.T
    )
    occurrences = np.concatenate([counts.counts for _, _, counts in counted])
    kernels.penalize(
        logits,
        lines,
        ids,
        to_device(occurrences, logits.device),
        repetition=repetition,
        presence=presence,
        frequency=frequency,
    )


def _places(
    logits: Tensor, ids_of_lines: Sequence[tuple[int, npt.NDArray[np.int64]]]
) -> tuple[Tensor, Tensor]:
    """Flatten (line, its token ids) pairs into line numbers [N] and ids [N]."""
    sizes = [len(ids) for _, ids in ids_of_lines]
    lines = np.repeat(np.array([line for line, _ in ids_of_lines], np.int64), sizes)
    ids = np.concatenate([ids for _, ids in ids_of_lines])
    return to_device(lines, logits.device), to_device(ids, logits.device)
