"""Rows of log-probabilities: joining and conversion."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from remora.engine.sampling.logprobs import concat_logprobs, to_token_logprobs
from remora.engine.types import LogprobRows, TokenLogprob


def make_lines(*token_ids: int, num_top: int = 2) -> LogprobRows:
    num = len(token_ids)
    ids = np.array(token_ids, np.int64)
    return LogprobRows(
        token_ids=ids,
        logprobs=(-ids / 2).astype(np.float32),
        ranks=np.arange(1, num + 1, dtype=np.int32),
        top_ids=np.stack([ids + place for place in range(num_top)], 1),
        top_logprobs=np.full((num, num_top), -0.25, np.float32),
    )


def test_joined_lines_keep_their_order() -> None:
    joined = concat_logprobs([make_lines(4), make_lines(7, 8)])

    assert joined.token_ids.tolist() == [4, 7, 8]
    assert joined.logprobs.tolist() == [-2.0, -3.5, -4.0]
    assert joined.ranks.tolist() == [1, 1, 2]
    assert joined.top_ids.tolist() == [[4, 5], [7, 8], [8, 9]]
    assert joined.top_logprobs.shape == (3, 2)


def test_asked_tokens_stay_with_their_lines() -> None:
    def asked(lines: LogprobRows, *values: float) -> LogprobRows:
        ids = np.full((len(values), 1), 9)
        return replace(lines, asked_ids=ids, asked_logprobs=np.array(values, np.float32)[:, None])

    joined = concat_logprobs([asked(make_lines(4), -1.0), asked(make_lines(7, 8), -2.0, -3.0)])
    tokens = to_token_logprobs(joined.part(slice(1, 3)))

    assert [(token.token_id, token.asked) for token in tokens] == [
        (7, ((9, -2.0),)),
        (8, ((9, -3.0),)),
    ]


def test_each_line_becomes_a_token_with_its_rivals() -> None:
    assert to_token_logprobs(make_lines(4)) == (TokenLogprob(4, -2.0, 1, ((4, -0.25), (5, -0.25))),)
