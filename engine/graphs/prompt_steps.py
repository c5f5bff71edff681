"""The arrays of captured steps with prompts, padded to the sizes of a graph.

A graph serves steps of up to its number of tokens. How many rows decode, how many are prompts, and
their lengths are data. Tokens are laid out as in StepInputs, padding last; rows have fixed places:

    tokens:  one of each decode row | those of prompts | padding
    rows:    decode rows, then rows of length 0 | prompts, rows of padding tokens, empty rows

Attention of decode rows takes the first tokens as queries. Queries of rows of length 0 belong to
prompts or padding, whose attention runs later and overwrites the zeros that such rows yield.
Padding tokens read and write the dump page. Knows nothing of graphs or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from remora.configs.planning.graph_sizes import MAX_PROMPTS
from remora.engine.graphs.staging import PaddedArrays, Shape
from remora.engine.kv.pages import DUMP_PAGE
from remora.engine.runner.inputs import Int32Array, StepInputs
from remora.kernels.row_tiles import cut_tiles, tile_size

MIN_GROWN = 1024  # entries of page tables: a cached prefix of 16 k tokens in pages of 16
INT64, INT32 = np.dtype(np.int64), np.dtype(np.int32)


@dataclass(frozen=True, kw_only=True)
class PromptShape:
    """Sizes of a captured step with prompts.

    num_tokens:   T
    max_decodes:  rows that may decode
    max_prompts:  rows that may have several tokens
    num_padding:  rows that share padding tokens
    row_padding:  most tokens of such a row
    num_slots:    adapter slots
    windowed:     whether window layers have a page pool of their own
    max_drafts:   of a row, each of which needs logits
    """

    num_tokens: int
    max_decodes: int
    max_prompts: int
    num_padding: int
    row_padding: int
    num_slots: int
    windowed: bool
    max_drafts: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the batch."""
        return self.max_decodes + self.max_prompts + self.num_padding

    @property
    def max_grown(self) -> int:
        """Most new entries of page tables."""
        return max(MIN_GROWN, self.num_tokens)

    def holds(self, inputs: StepInputs) -> bool:
        """Return whether a step of at most `num_tokens` tokens fits."""
        return len(inputs.rows) - inputs.num_decodes <= self.max_prompts

    def shapes(self, adapted: bool) -> list[Shape]:
        """Return the shapes of `arrays`."""
        return self._shapes[: None if adapted else -2]

    @cached_property
    def _shapes(self) -> list[Shape]:
        tokens, grown = self.num_tokens, self.max_grown
        logits = min(tokens, self.max_decodes + self.max_prompts * (1 + self.max_drafts))
        num_tiles = tokens // tile_size(tokens) + min(self.num_slots, tokens)
        return [
            *(Shape((tokens,), INT64) for _ in range(3 + self.windowed)),
            Shape((self.num_rows,), INT64),
            Shape((self.num_rows,), INT32),
            Shape((self.num_rows + 1,), INT32),
            *(Shape((logits,), INT64) for _ in range(2)),
            *(Shape((grown,), INT64) for _ in range(2)),
            *(Shape((grown,), INT32) for _ in range(2)),
            Shape((tokens,), INT32),
            Shape((num_tiles, 3), INT32),
        ]

    def arrays(
        self,
        inputs: StepInputs,
        grown: Int32Array,
        sampled: npt.NDArray[np.int64],
        *,
        line: int,
        adapted: bool,
    ) -> PaddedArrays:
        """Return a step's arrays, each with the value of the padding at its end.

        They are token ids, positions, slots and, with `windowed`, slots of window layers; lines of
        tables, lengths and starts of rows; `logit_index` and its rows' lines; new entries of page
        tables, in four; with `adapted`, rows and tiles of adapters.

        grown:    as in StepInputs
        sampled:  [R], lines of rows with logits
        line:     of the tables, for padding
        """
        windows = inputs.windows
        arrays: PaddedArrays = [
            (inputs.token_ids, 0),
            (inputs.positions, 0),
            (inputs.slots, DUMP_PAGE),
            *([] if windows is None else [(windows.slots, DUMP_PAGE)]),
            (self._placed(inputs.rows, inputs.num_decodes, line), line),
            (self._lengths(inputs), 0),
            (self._starts(inputs), self.num_tokens),
            (inputs.logit_index, 0),
            (sampled, line),
            (grown[0], line),
            (grown[1], 0),
            (grown[2], DUMP_PAGE),
            (grown[3], DUMP_PAGE),
        ]
        if adapted:
            tiles = cut_tiles(inputs.adapters, tile_size(self.num_tokens))
            arrays += [(each, 0) for each in tiles]
        return arrays

    def _placed(
        self, values: npt.NDArray[np.int64], num_decodes: int, rest: int
    ) -> npt.NDArray[np.int64]:
        """Return the rows' values with those of prompts in their places."""
        between = np.full(self.max_decodes - num_decodes, rest)
        return np.concatenate((values[:num_decodes], between, values[num_decodes:]))

    def _lengths(self, inputs: StepInputs) -> npt.NDArray[np.int64]:
        lengths = self._placed(inputs.lengths, inputs.num_decodes, 0)
        return np.concatenate((lengths, np.diff(self._padding(inputs))))

    def _starts(self, inputs: StepInputs) -> npt.NDArray[np.int64]:
        prompts = inputs.starts[inputs.num_decodes : -1]
        return np.concatenate((np.arange(self.max_decodes), prompts, self._padding(inputs)))

    def _padding(self, inputs: StepInputs) -> npt.NDArray[np.int64]:
        """Return the first token of each padding row, then the end of the last."""
        firsts = inputs.num_tokens + np.arange(self.num_padding + 1) * self.row_padding
        return np.minimum(firsts, self.num_tokens)


def prompt_shapes(
    sizes: Sequence[int],
    *,
    max_rows: int,
    max_pages: int,
    num_slots: int,
    windowed: bool,
    max_drafts: int = 0,
) -> list[PromptShape]:
    """Return the shapes of captured steps of these numbers of tokens, ascending.

    max_rows:               of a step
    max_pages, max_drafts:  of a row
    """
    return [
        PromptShape(
            num_tokens=size,
            max_decodes=min(max_rows, size) - 1,  # at least one row has several tokens
            max_prompts=max(1, min(max_rows, size // 2, MAX_PROMPTS)),
            num_padding=-(-(size - smaller) // max_pages),
            row_padding=max_pages,  # a page has a token at least
            num_slots=num_slots,
            windowed=windowed,
            max_drafts=max_drafts,
        )
        for smaller, size in pairwise((0, *sizes))
    ]
