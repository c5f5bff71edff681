"""Counting of tokens for penalties."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from remora.engine.sampling.logit_edits import TokenCounts

TOKENS = st.lists(st.integers(0, 400), max_size=300)


@settings(deadline=None)
@given(prompt=TOKENS, known=TOKENS, added=TOKENS)
@example(prompt=[1], known=[2], added=[*range(200), *range(200)])
def test_every_distinct_token_is_listed_once_with_its_count_in_the_output(
    prompt: list[int], known: list[int], added: list[int]
) -> None:
    counts = TokenCounts(np.array(prompt + known, np.int64), len(prompt))

    for token_id in added:
        counts.add(token_id)

    outputs = known + added
    counted = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert len(counted) == len(counts.ids)
    assert counted == {token_id: outputs.count(token_id) for token_id in {*prompt, *outputs}}
