"""The proposer of predicted outputs: drafts from a text that the client expects.

A client that edits a file knows most of the reply. As long as the output follows the prediction,
its next tokens are the drafts; after a difference, the last tokens of the output are looked up in
the prediction, and the drafts go on from there. Rows without a prediction, or whose output is
elsewhere, get the drafts of another proposer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from remora.engine.spec.gram_index import GramIndex, IndexedText
from remora.engine.spec.proposer import Proposer


class _Prediction:
    """A predicted text, and where the output is in it.

    place:  position of the next expected token; None = the output has left the prediction
    """

    def __init__(self, text: IndexedText, longest: int) -> None:
        self.text = text
        self.place: int | None = 0
        self._tail: deque[int] = deque(maxlen=longest)

    def follow(self, token_ids: Sequence[int]) -> None:
        """Advance by emitted tokens."""
        expected = self.text.token_ids
        for token_id in token_ids:
            place = self.place
            agrees = place is not None and expected[place : place + 1] == [token_id]
            self.place = place + 1 if place is not None and agrees else None
        self._tail.extend(token_ids)

    def drafts(self, most: int) -> Sequence[int]:
        """Return the next expected tokens, after finding the output's place if it was lost."""
        if self.place is None:
            self.place = self.text.find(list(self._tail))
        return () if self.place is None else self.text.token_ids[self.place : self.place + most]


class PredictionProposer:
    """Proposes predicted tokens first, and another proposer's drafts where there are none.

    shortest, longest:  tokens of the output's suffixes that are looked up in a prediction
    max_bytes:          memory of the index of all predictions
    """

    def __init__(self, otherwise: Proposer, *, shortest: int, longest: int, max_bytes: int) -> None:
        self._otherwise = otherwise
        self._longest = longest
        self._index = GramIndex(shortest, longest, max_bytes)
        self._predictions: dict[int, _Prediction] = {}

    def predict(self, key: int, token_ids: Sequence[int]) -> None:
        """Add the prediction of a sequence that has no output yet."""
        self._predictions[key] = _Prediction(self._index.add(key, token_ids), self._longest)

    def begin(self, key: int, token_ids: Sequence[int]) -> None:
        """Add a sequence to the other proposer."""
        self._otherwise.begin(key, token_ids)

    def extend(self, key: int, token_ids: Sequence[int]) -> None:
        """Follow emitted tokens in the prediction."""
        self._otherwise.extend(key, token_ids)
        if (prediction := self._predictions.get(key)) is not None:
            prediction.follow(token_ids)

    def propose(self, rows: Sequence[tuple[int, int]]) -> list[Sequence[int]]:
        """Return predicted tokens, and the other proposer's drafts for the other rows."""
        self._index.work()
        drafts: list[Sequence[int]] = [self._expected(key, most) for key, most in rows]
        others = [index for index, found in enumerate(drafts) if not found]
        for index, found in zip(
            others, self._otherwise.propose([rows[index] for index in others]), strict=True
        ):
            drafts[index] = found
        return drafts

    def end(self, key: int) -> None:
        """Forget a sequence and its prediction."""
        self._otherwise.end(key)
        self._index.remove(key)
        self._predictions.pop(key, None)

    def _expected(self, key: int, most: int) -> Sequence[int]:
        prediction = self._predictions.get(key)
        return () if prediction is None else prediction.drafts(most)
