"""Prompts that are given as embeddings: a row of numbers for each position instead of a token id.

The rows stand for rows of the model's embedding table, before a factor or learned positions. They
replace the table's rows of the first layer's input; all else of a request is as with ids. Nothing
here knows torch, tokens or HTTP.

Legend: T positions of a prompt, H the model's hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from remora.configs.errors import InvalidRequest

NO_ID = 0
"""Stands where a position has no token id. It is a valid id, and nothing it says is used."""

_DIGEST_BYTES = 16
# Larger numbers become infinite in the format.
_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedTokens:
    """Tokens of a step whose embeddings are given.

    places:  [E] of the step's tokens, ascending
    rows:    [E, H]
    """

    places: npt.NDArray[np.int64]
    rows: npt.NDArray[np.float32]

    @staticmethod
    def of(spans: Iterable[tuple[PromptEmbeddings | None, int, int]]) -> EmbeddedTokens | None:
        """Return what is given for a step's tokens, row by row; None if nothing is.

        spans:  of each row, the embeddings of its prompt, its first position and how many follow
        """
        places, rows = list[npt.NDArray[np.int64]](), list[npt.NDArray[np.float32]]()
        at = 0
        for given, start, count in spans:
            if given is not None and start < len(given.rows):
                found = given.rows[start : start + count]
                places.append(at + np.arange(len(found)))
                rows.append(found)
            at += count
        return EmbeddedTokens(np.concatenate(places), np.concatenate(rows)) if places else None

    def part(self, tokens: range) -> EmbeddedTokens | None:
        """Return what is given for a range of the step's tokens, which counts from its start."""
        first, last = np.searchsorted(self.places, (tokens.start, tokens.stop))
        if first == last:
            return None
        return EmbeddedTokens(self.places[first:last] - tokens.start, self.rows[first:last])


@dataclass(frozen=True, eq=False)
class PromptEmbeddings:
    """The embeddings of a whole prompt. Equal ones have equal rows.

    rows:  [T, H], finite; not changed any more
    """

    rows: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PromptEmbeddings) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def ids(self) -> list[int]:
        """The ids [T] in place of token ids."""
        return [NO_ID] * len(self.rows)

    @cached_property
    def digest(self) -> str:
        """Names the contents: equal for equal embeddings, and for no others."""
        shape = "x".join(map(str, self.rows.shape))
        made = blake2b(shape.encode(), digest_size=_DIGEST_BYTES)
        made.update(np.ascontiguousarray(self.rows).data)
        return made.hexdigest()


def check_rows(
    rows: npt.NDArray[np.float32], *, hidden_size: int | None, dtype: str, param: str
) -> None:
    """Raise InvalidRequest unless a model can begin with these embeddings.

    hidden_size, dtype:  of the model; None = it takes none
    param:               the caller's field
    """
    if hidden_size is None:
        raise InvalidRequest(
            f"{param}: this model takes no embeddings as input; send text or token ids.", param
        )
    if rows.ndim != 2 or rows.shape[1] != hidden_size or len(rows) == 0:
        shape = " x ".join(map(str, rows.shape))
        raise InvalidRequest(
            f"{param} has the shape {shape}; it must be [tokens, {hidden_size}], with at least one "
            f"token and as many numbers for each as the model's hidden size, {hidden_size}.",
            param,
        )
    largest = float(np.abs(rows).max())
    if not largest <= _LARGEST.get(dtype, float(np.finfo(np.float32).max)):
        raise InvalidRequest(
            f"{param} holds numbers that are not finite in the model's format, {dtype}; send "
            "finite numbers within its range.",
            param,
        )
