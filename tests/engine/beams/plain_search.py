"""Beam search written down plainly, without pages or rows: what the engine is compared with.

Diverse beam search is that of arXiv:1610.02424 with Hamming diversity: in each step, groups choose
one after the other, and a token loses `diversity_penalty` for each choice of it by earlier groups.

As in transformers, a step regards the best 2 (1 + the number of stop tokens, if that is more) times
`width` continuations of a group. Texts may end so many of them that fewer beams go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from remora.engine.beams.params import BeamParams

Scores = np.ndarray[Any, np.dtype[np.float32]]


@dataclass
class _Group:
    beams: list[tuple[list[int], np.float32]] = field(default_factory=list)
    done: list[tuple[list[int], float]] = field(default_factory=list)
    is_over: bool = False


def plain_search(
    next_scores: Callable[[list[int]], Scores],
    prompt: Sequence[int],
    params: BeamParams,
    *,
    stop_ids: set[int],
    max_tokens: int,
    ends: Callable[[list[int]], bool] = lambda output: False,
) -> list[tuple[list[int], float]]:
    """Return outputs and scores, best first.

    ends:  whether the text of an output ends it
    """

    def has_ended(output: list[int]) -> bool:
        return output[-1] in stop_ids or len(output) == max_tokens or ends(output)

    num_kept = max(2, 1 + len(stop_ids)) * params.width // params.num_groups
    groups = [_Group([([], np.float32(0))]) for _ in range(params.num_groups)]
    for length in range(1, max_tokens + 1):
        chosen: list[int] = []
        for group in groups:
            if not group.is_over:
                _continue(group, next_scores, prompt, params, chosen, has_ended, num_kept)
                _end(group, params, length, max_tokens)
                chosen += [output[-1] for output, _ in group.beams if not group.is_over]
    done = [each for group in groups for each in group.done]
    return sorted(done, key=lambda each: -each[1])


def _continue(
    group: _Group,
    next_scores: Callable[[list[int]], Scores],
    prompt: Sequence[int],
    params: BeamParams,
    chosen: list[int],
    has_ended: Callable[[list[int]], bool],
    num_kept: int,
) -> None:
    width = params.width // params.num_groups
    everything: list[tuple[np.float32, list[int]]] = []
    for output, total in group.beams:
        scores = next_scores([*prompt, *output])
        for token in chosen:
            scores[token] -= np.float32(params.diversity_penalty)
        everything += [
            (np.float32(total + score), [*output, token])
            for token, score in enumerate(scores)
            if score > -np.inf
        ]
    everything.sort(key=lambda each: -each[0])
    group.beams = []
    for rank, (total, output) in enumerate(everything[:num_kept]):
        if has_ended(output):
            if rank < width:
                factor = np.float32(len(output) ** params.length_penalty)
                group.done.append((output, float(total / factor)))
        elif len(group.beams) < width:
            group.beams.append((output, total))


def _end(group: _Group, params: BeamParams, length: int, max_tokens: int) -> None:
    width = params.width // params.num_groups
    group.done.sort(key=lambda each: -each[1])
    del group.done[width:]
    if not group.beams:
        group.is_over = True
    elif len(group.done) == width:
        is_patient = params.early_stopping == "never" and params.length_penalty > 0
        best_length = max_tokens if is_patient else length
        best = float(group.beams[0][1] / np.float32(best_length**params.length_penalty))
        group.is_over = params.early_stopping is True or best <= group.done[-1][1]
