"""Beam search: which continuations of the beams live on, and which outputs are the best.

The results are those of transformers' `generate` with `num_beams`. Groups (diverse beam search,
arXiv:1610.02424) search one after the other, each with a penalty on the tokens of earlier ones.
A path that a stop text ends is one that a stop token ends, as with `stop_strings` there.
Sums are float32. Knows scores, token ids and whether a path's text has stopped; no rows, pages or
tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import numpy as np

from remora.engine.beams.params import BeamParams
from remora.engine.types import Candidates, FloatArray

ZERO = np.float32(0)

End = Literal["stop_token", "stop_text", "length"]


class PathText(Protocol):
    """The text of a path, in which stop texts are searched."""

    @property
    def stop(self) -> str | None:
        """The stop text that was found."""

    def push(self, token_id: int, /) -> object:
        """Add a token."""

    def fork(self) -> Self:
        """Return the text of another path that is the same so far."""


@dataclass(frozen=True, slots=True)
class Step:
    """One token of a path, and the path before it; paths share their beginnings.

    place:  of the token among its candidates
    """

    before: Step | None
    candidates: Candidates
    place: int

    @property
    def token_id(self) -> int:
        """The token."""
        return int(self.candidates.token_ids[self.place])


@dataclass(frozen=True, slots=True)
class Beam:
    """A path that may continue.

    parent:  index of the beam that it continues, among those of the step before
    total:   sum of its tokens' log-probabilities, less penalties
    text:    of its tokens; None = no stop text is searched
    """

    parent: int
    total: np.float32
    path: Step | None
    text: PathText | None = None

    @property
    def token_id(self) -> int:
        """The newest token."""
        assert self.path is not None
        return self.path.token_id


@dataclass(frozen=True, slots=True)
class Finished:
    """A path that has ended.

    score:  by which outputs are ranked
    end:    what ended it
    """

    score: float
    path: Step
    end: End

    def steps(self) -> list[Step]:
        """Return its steps in order."""
        steps: list[Step] = []
        step: Step | None = self.path
        while step is not None:
            steps.append(step)
            step = step.before
        return steps[::-1]


class _Group:
    """The beams of one group, and its best finished outputs."""

    def __init__(self, params: BeamParams, stop_ids: Set[int], max_tokens: int) -> None:
        self.finished: list[Finished] = []
        self.beams: list[Beam] = []
        self._params = params
        self._width = params.group_width
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens

    def advance(
        self,
        indexes: Sequence[int],
        beams: Sequence[Beam],
        candidates: Mapping[int, Candidates],
        penalties: Mapping[int, int],
        length: int,
    ) -> None:
        """Continue the beams of these indexes by one token.

        candidates:  by index
        penalties:   token id -> how often earlier groups chose it in this step
        length:      tokens of an output with the new one
        """
        totals = [
            beams[index].total + self._penalized(candidates[index], penalties) for index in indexes
        ]
        ranked = np.argsort(-np.concatenate(totals), kind="stable")
        ends = np.cumsum([len(total) for total in totals])
        num_kept = self._params.num_kept(len(self._stop_ids))
        self.beams = []
        for rank, place in enumerate(ranked[:num_kept].tolist()):
            source = int(np.searchsorted(ends, place, side="right"))
            offset = place - int(ends[source]) + len(totals[source])
            total = totals[source][offset]
            if total == -np.inf:
                break
            if rank >= self._width and len(self.beams) == self._width:
                break
            index = indexes[source]
            step = Step(beams[index].path, candidates[index], offset)
            end, text = self._end_of(beams[index], step.token_id, length)
            if end is None:
                if len(self.beams) < self._width:
                    self.beams.append(Beam(index, total, step, text))
            elif rank < self._width:
                score = float(total / _length_factor(length, self._params.length_penalty))
                self.finished.append(Finished(score, step, end))
        if self._is_done(length):
            self.beams = []

    def _end_of(self, beam: Beam, token_id: int, length: int) -> tuple[End | None, PathText | None]:
        """Return what ends a beam with its next token, if anything does, and the text with it."""
        if token_id in self._stop_ids:
            return "stop_token", None
        text = beam.text
        if text is not None:
            text = text.fork()
            text.push(token_id)
            if text.stop is not None:
                return "stop_text", text
        return ("length" if length >= self._max_tokens else None), text

    def _penalized(self, candidates: Candidates, penalties: Mapping[int, int]) -> FloatArray:
        penalty = self._params.diversity_penalty
        if not penalties or not penalty:
            return candidates.scores
        counts = [penalties.get(token_id, 0) for token_id in candidates.token_ids.tolist()]
        return candidates.scores - np.float32(penalty) * np.array(counts, np.float32)

    def _is_done(self, length: int) -> bool:
        """Keep the best finished outputs; return whether no beam can improve them."""
        self.finished.sort(key=lambda each: -each.score)
        del self.finished[self._width :]
        if not self.beams:
            return True
        if len(self.finished) < self._width:
            return False
        params = self._params
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._max_tokens
        best = float(self.beams[0].total / _length_factor(length, params.length_penalty))
        return best <= self.finished[-1].score


class BeamSearch:
    """The beams of one request: one at first, up to the width after the first step."""

    def __init__(
        self,
        params: BeamParams,
        *,
        stop_ids: Set[int],
        max_tokens: int,
        text: PathText | None = None,
    ) -> None:
        """Begin with one beam.

        stop_ids:    tokens that end an output, which they belong to
        max_tokens:  of an output
        text:        of an output without tokens; None = no stop text is searched
        """
        self.beams: list[Beam] = [Beam(0, ZERO, None, text)]
        self.length = 0
        self._groups = [_Group(params, stop_ids, max_tokens) for _ in range(params.num_groups)]
        self._indexes: list[Sequence[int]] = [(0,)] * params.num_groups

    @property
    def is_done(self) -> bool:
        """Whether no beam is left."""
        return not self.beams

    def advance(self, candidates: Sequence[Candidates]) -> None:
        """Replace the beams by their best continuations, each of which names its parent.

        candidates:  of each beam, in order
        """
        self.length += 1
        chosen = Counter[int]()
        by_index = dict(enumerate(candidates))
        beams: list[Beam] = []
        for place, group in enumerate(self._groups):
            if not self._indexes[place]:
                continue  # it has ended
            group.advance(self._indexes[place], self.beams, by_index, chosen, self.length)
            chosen.update(beam.token_id for beam in group.beams)
            self._indexes[place] = range(len(beams), len(beams) + len(group.beams))
            beams += group.beams
        self.beams = beams

    def best(self, count: int) -> list[Finished]:
        """Return the best outputs so far, at most `count`, best first."""
        finished = [each for group in self._groups for each in group.finished]
        return sorted(finished, key=lambda each: -each.score)[:count]


def _length_factor(length: int, length_penalty: float) -> np.float32:
    return np.float32(length**length_penalty)
