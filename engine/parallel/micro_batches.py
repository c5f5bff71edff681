"""Splits a step's tokens into parts, so that pipeline stages work at the same time.

Parts run in order, and a stage stores the K and V of one part before the next, so a cut may split a
row. Knows nothing of ranks.
"""

from __future__ import annotations

import numpy as np

from remora.configs.planning.shares import share
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
        windows=None
        if inputs.windows is None
        else WindowInputs(slots=inputs.windows.slots[cut], tables=inputs.windows.tables),
    )
