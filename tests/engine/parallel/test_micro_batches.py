"""Steps cut into parts hold the same tokens, in order, with the context that each part has."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from remora.engine.parallel.micro_batches import split_inputs
from remora.engine.runner.inputs import StepInputs

NO_TABLES = np.zeros((0, 0), dtype=np.int32)


def make_inputs(num_decodes: int, chunks: list[int], before: int = 5) -> StepInputs:
    """A step of rows with one token each, then rows with chunks; `before` tokens are computed."""
    counts = np.array([1] * num_decodes + chunks, dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)))
    positions = np.concatenate([before + np.arange(count) for count in counts])
    tokens = np.arange(starts[-1])
    return StepInputs(
        token_ids=tokens,
        positions=positions,
        slots=1000 + tokens,
        starts=starts,
        lengths=before + counts,
        rows=np.arange(len(counts)) + 40,
        tables=NO_TABLES,
        num_decodes=num_decodes,
        logit_index=starts[1:] - 1,
        adapters=(tokens % 3).astype(np.int32),
        grown=np.empty((3, 0), np.int32),
    )


@given(st.integers(0, 9), st.lists(st.integers(2, 30), max_size=5), st.integers(1, 8))
def test_parts_are_the_step_cut_into_equal_pieces(
    num_decodes: int, chunks: list[int], num_parts: int
) -> None:
    if not num_decodes and not chunks:
        num_decodes = 1
    whole = make_inputs(num_decodes, chunks)

    parts = split_inputs(whole, num_parts)

    sizes = [part.num_tokens for part in parts]
    assert len(parts) == min(num_parts, whole.num_tokens)
    assert max(sizes) - min(sizes) <= 1
    for name in ("token_ids", "positions", "slots", "adapters"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        assert np.array_equal(joined, getattr(whole, name))
    assert sum(part.num_decodes for part in parts) == num_decodes
    for part in parts:
        check_rows(part, whole)


def check_rows(part: StepInputs, whole: StepInputs) -> None:
    """Every row's tokens are its own, and its context ends at the last of them."""
    assert part.starts[0] == 0
    assert part.starts[-1] == part.num_tokens
    assert (np.diff(part.starts) > 0).all()
    for place, row in enumerate(part.rows.tolist()):
        start, stop = part.starts[place], part.starts[place + 1]
        original = whole.rows.tolist().index(row)
        tokens = part.token_ids[start:stop]
        assert (tokens >= whole.starts[original]).all()
        assert (tokens < whole.starts[original + 1]).all()
        assert part.lengths[place] == part.positions[stop - 1] + 1
        if place < part.num_decodes:
            assert stop - start == 1


def test_a_cut_may_go_through_a_prompt() -> None:
    first, second = split_inputs(make_inputs(2, [8], before=0), 2)

    assert first.rows.tolist() == [40, 41, 42]
    assert (first.num_decodes, first.lengths.tolist()) == (2, [1, 1, 3])
    assert second.rows.tolist() == [42]
    assert (second.num_decodes, second.lengths.tolist()) == (0, [8])
    assert second.starts.tolist() == [0, 5]
