"""Predicted outputs: drafts from a text that the client expects to get.

A client that edits a file knows most of the answer. While the output follows its prediction, the
next predicted tokens are the drafts; after a difference, the output's last tokens are looked up in
the prediction, and the drafts go on from there. Rows without a prediction, or whose output is
elsewhere, get the drafts of another proposer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from remora.engine.spec.gram_index import GramIndex, IndexedText
from remora.engine.spec.proposer import Proposer
from remora.engine.types import Namespace

_SHORTEST, _LONGEST = 2, 5  # tokens that find the output's place again
_INDEX_BYTES = 32 * 2**20  # of all predictions


class _Prediction:
    """A predicted text, and the position of the next expected token; None = the output left it."""

    def __init__(self, text: IndexedText) -> None:
        self.text = text
        self.place: int | None = 0
        self._tail: deque[int] = deque(maxlen=_LONGEST)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Advance by output tokens."""
        expected = self.text.token_ids
        for token_id in token_ids:
            place = self.place
            agrees = place is not None and expected[place : place + 1] == [token_id]
            self.place = place + 1 if place is not None and agrees else None
        self._tail.extend(token_ids)

    def drafts(self, most: int) -> Sequence[int]:
        """Return the next expected tokens, after looking for the output's place if it was lost."""
        if self.place is None:
            self.place = self.text.find(list(self._tail))
        return () if self.place is None else self.text.token_ids[self.place : self.place + most]


class PredictionProposer:
    """Proposes predicted tokens, and another proposer's drafts where there are none.

    predicted:  sequences whose latest drafts were predicted
    """

    def __init__(self, otherwise: Proposer) -> None:
        self.predicted: set[int] = set()
        self._otherwise = otherwise
        self._index = GramIndex(_SHORTEST, _LONGEST, _INDEX_BYTES)
        self._predictions: dict[int, _Prediction] = {}

    def predict(self, key: int, token_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Add the prediction of a sequence, and the output that the sequence already has."""
        prediction = _Prediction(self._index.add(key, token_ids))
        prediction.follow(output_ids)
        self._predictions[key] = prediction

    def expects(self, key: int) -> bool:
        """Return whether the next drafts of a sequence are likely to be predicted."""
        prediction = self._predictions.get(key)
        return prediction is not None and prediction.place is not None

    def begin(self, key: int, token_ids: Sequence[int], namespace: Namespace) -> None:
        """Add a sequence to the other proposer."""
        self._otherwise.begin(key, token_ids, namespace)

    def extend(self, key: int, token_ids: Sequence[int]) -> None:
        """Follow output tokens in the prediction."""
        self._otherwise.extend(key, token_ids)
        if (prediction := self._predictions.get(key)) is not None:
            prediction.follow(token_ids)

    def propose(self, rows: Sequence[tuple[int, int]]) -> list[Sequence[int]]:
        """Return predicted tokens, and the other proposer's drafts for the other rows."""
        if not self._predictions:
            return self._otherwise.propose(rows)
        self._index.work()
        drafts: list[Sequence[int]] = [self._expected(key, most) for key, most in rows]
        self.predicted = {key for (key, _), found in zip(rows, drafts, strict=True) if found}
        others = [place for place, found in enumerate(drafts) if not found]
        proposed = self._otherwise.propose([rows[place] for place in others])
        for place, found in zip(others, proposed, strict=True):
            drafts[place] = found
        return drafts

    def end(self, key: int) -> None:
        """Forget a sequence and its prediction."""
        self._otherwise.end(key)
        self._index.remove(key)
        self._predictions.pop(key, None)
        self.predicted.discard(key)

    def _expected(self, key: int, most: int) -> Sequence[int]:
        prediction = self._predictions.get(key)
        return () if prediction is None else prediction.drafts(most)
