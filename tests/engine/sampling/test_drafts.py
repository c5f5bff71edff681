"""Rows with drafts get the tokens and log-probabilities that they get one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.engine.sampling.sampler import Sampler, SampleResult
from remora.engine.spec.acceptance import NO_DRAFT, DraftLines
from remora.engine.types import NOT_FINITE, LogprobRows
from tests.engine.sampling.sampled import (
    PARAMS,
    VOCAB_SIZE,
    MakeSampler,
    make_logits,
    make_peak,
    make_row,
    rows,
)

PROMPT = [3, 40, 7]
BAD_WORDS = st.sampled_from([(), ((9,), (40, 3), (3, 40, 7))])


def logits_after(tokens: list[int]) -> torch.Tensor:
    """The fake model: peaks that repeat tokens, so that penalties and bad words matter."""
    seed = sum((place + 1) * token for place, token in enumerate(tokens))
    return make_logits(seed) + make_peak(tokens[-3], tokens[-1], seed % 20, height=4.0)


def lines_of(numbers: list[int], drafts: list[list[int]]) -> DraftLines:
    """The lines of rows with these drafts."""
    counts = [1 + len(each) for each in drafts]
    return DraftLines(
        rows=np.repeat(rows(*numbers), counts),
        offsets=np.concatenate([np.arange(count) for count in counts]),
        draft_ids=np.array([token for each in drafts for token in (*each, NO_DRAFT)]),
    )


def one_by_one(sampler: Sampler, count: int) -> list[SampleResult]:
    results, tokens = [], list(PROMPT)
    for _ in range(count):
        results.append(sampler.sample(logits_after(tokens), rows(0)))
        tokens.append(int(results[-1].token_ids[0]))
    return results


def test_lines_are_kept_up_to_the_first_wrong_draft() -> None:
    lines = lines_of([4, 2, 7], [[10, 11], [], [20, 21, 22]])

    kept = lines.kept(np.array([10, 12, 13, 1, 20, 21, 22, 23]))

    assert kept.tolist() == [True, True, False, True, True, True, True, True]
    assert lines.rows[kept].tolist() == [4, 4, 2, 7, 7, 7, 7]


def test_a_faulty_line_behind_a_draft_waits_for_the_next_step() -> None:
    lines = lines_of([0, 1], [[10, 11], [20]])

    kept = lines.kept(np.array([10, 11, 12, 20, 21]), faulty={1, 3})

    assert kept.tolist() == [True, False, False, True, True]


@given(params=PARAMS, bad_words=BAD_WORDS, seed=st.integers(0, 99), data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_same_tokens_and_lines(
    make_sampler: MakeSampler,
    params: dict[str, Any],
    bad_words: tuple[tuple[int, ...], ...],
    seed: int,
    data: st.DataObject,
) -> None:
    def start() -> Sampler:
        return make_sampler(
            make_row(0, PROMPT, seed=seed, bad_words_ids=bad_words, **params),
            make_row(1, PROMPT, seed=5, temperature=0.8),
        )

    plain, drafting = one_by_one(start(), 14), start()
    truth = [int(result.token_ids[0]) for result in plain]
    beside = make_sampler(make_row(1, PROMPT, seed=5, temperature=0.8))
    tokens: list[int] = []
    described: list[LogprobRows] = []
    while len(tokens) < 8:
        drafts = truth[len(tokens) : len(tokens) + data.draw(st.integers(1, 6))]
        wrong = data.draw(st.integers(0, 6))
        if wrong < len(drafts):
            drafts[wrong] = (drafts[wrong] + 1) % VOCAB_SIZE
        lines = lines_of([1, 0], [[], drafts])
        known = PROMPT + tokens
        own = [logits_after(known + drafts[:count]) for count in range(len(drafts) + 1)]
        other = make_logits(len(tokens))

        result = drafting.sample(torch.cat([other, *own]), lines.rows, lines)

        run = result.token_ids[result.rows == 0].tolist()
        assert len(run) == 1 + min(wrong, len(drafts))
        tokens += run
        assert result.token_ids[0] == beside.sample(other, rows(1)).token_ids[0]
        if 0 in result.logprobs:
            described.append(result.logprobs[0])
    assert tokens == truth[: len(tokens)]
    if params["logprobs"] is not None:
        for name in ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs"):
            got = np.concatenate([getattr(lines, name) for lines in described])
            want = [getattr(result.logprobs[0], name) for result in plain[: len(tokens)]]
            np.testing.assert_array_equal(got, np.concatenate(want))


def test_only_a_fault_of_the_first_line_ends_a_row(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(make_row(0, PROMPT, temperature=0.0), make_row(1, PROMPT))
    bad = torch.full((1, VOCAB_SIZE), torch.nan)
    lines = lines_of([0, 1], [[8], [8]])

    result = sampler.sample(torch.cat([make_peak(8), bad, bad, make_peak(8)]), lines.rows, lines)

    assert result.bad_rows == {1: NOT_FINITE}
    assert result.token_ids[result.rows == 0].tolist() == [8]
