"""Splits a step's tokens into parts, so that pipeline stages work at the same time.

Parts run in order, and a stage stores the K and V of one part before the next, so a cut may split a
row. Knows nothing of ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from remora.configs.planning.shares import share
from remora.engine.runner.batch import ForwardBatch
from remora.engine.runner.inputs import StepInputs, WindowInputs


def split_inputs(inputs: StepInputs, num_parts: int) -> list[StepInputs]:
    """Split a step into at most `num_parts` parts of equal size, each of one token at least.

    Their `logit_index` is empty: the caller projects the whole step's tokens to logits.
    """
    num_tokens = inputs.num_tokens
    num_parts = min(num_parts, num_tokens)
    if num_parts <= 1:
        return [inputs]
    return [_part(inputs, share(num_tokens, index, num_parts)) for index in range(num_parts)]


def _part(inputs: StepInputs, tokens: range) -> StepInputs:
    """Return a step of these tokens; its first row may begin late, and its last end early."""
    starts = inputs.starts
    first = int(np.searchsorted(starts, tokens.start, side="right")) - 1
    last = int(np.searchsorted(starts, tokens.stop, side="left"))
    lengths = inputs.lengths[first:last].copy()
    lengths[-1] -= starts[last] - tokens.stop
    cut = slice(tokens.start, tokens.stop)
    return StepInputs(
        token_ids=inputs.token_ids[cut],
        positions=inputs.positions[cut],
        slots=inputs.slots[cut],
        starts=np.clip(starts[first : last + 1], tokens.start, tokens.stop) - tokens.start,
        lengths=lengths,
        rows=inputs.rows[first:last],
        tables=inputs.tables,
        num_decodes=min(max(inputs.num_decodes - first, 0), last - first),
        logit_index=inputs.logit_index[:0],
        adapters=inputs.adapters[cut],
        grown=inputs.grown,
        embedded=None if inputs.embedded is None else inputs.embedded.part(tokens),
        windows=None
        if inputs.windows is None
        else WindowInputs(slots=inputs.windows.slots[cut], tables=inputs.windows.tables),
    )


def split_batch(batch: ForwardBatch, num_parts: int) -> list[ForwardBatch]:
    """Split a batch on the device as `split_inputs` splits a step, without waiting for the device.

    A batch with adapters or given embeddings stays whole.
    """
    num_tokens, adapters = len(batch.token_ids), batch.adapters
    num_parts = min(num_parts, num_tokens)
    has_adapters = bool(adapters.groups) or adapters.tiles is not None
    if num_parts <= 1 or has_adapters or batch.embedded is not None:
        return [batch]
    return [_batch_part(batch, share(num_tokens, index, num_parts)) for index in range(num_parts)]


def _batch_part(batch: ForwardBatch, tokens: range) -> ForwardBatch:
    """Return a batch of these tokens; its first row may begin late, and its last end early."""
    start, stop, decodes = tokens.start, tokens.stop, batch.num_decodes
    bounds = batch.extend_starts
    num_rows = decodes + len(bounds) - 1
    starts_of = [*range(decodes), *bounds]  # of each row, then T
    first = max(row for row in range(num_rows) if starts_of[row] <= start)
    last = min(row for row in range(1, num_rows + 1) if starts_of[row] >= stop)
    ends = batch.starts[first + 1 : last + 1]
    own_decodes = min(max(decodes - first, 0), last - first)
    extends = range(first + own_decodes, last)
    part = replace(
        batch,
        token_ids=batch.token_ids[start:stop],
        positions=batch.positions[start:stop],
        slots=batch.slots[start:stop],
        num_decodes=own_decodes,
        tables=batch.tables[first:last],
        starts=batch.starts[first : last + 1].clamp(start, stop) - start,
        lengths=batch.lengths[first:last] - (ends - ends.clamp(max=stop)),
        extend_starts=tuple(
            min(max(starts_of[row], start), stop) - start for row in (*extends, last)
        ),
        extend_lens=tuple(
            batch.extend_lens[row - decodes] - max(starts_of[row + 1] - stop, 0) for row in extends
        ),
        logit_index=batch.logit_index[:0],
        windowed=None,
    )
    if batch.windowed is None:
        return part
    slots, tables = batch.windowed.slots[start:stop], batch.windowed.tables[first:last]
    return replace(part, windowed=replace(part, slots=slots, tables=tables))
