"""The sampler: order of the pipeline, seeds, resumed rows, company, log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from remora.configs.errors import InvalidSampling
from remora.engine.sampling.sampler import check_token_ids, random_bits
from remora.engine.sampling.token_sampler import SamplingKernels, describe
from remora.engine.types import NO_TOKEN_LEFT
from tests.engine.sampling.constrained import ToyGrammar, ids, make_request
from tests.engine.sampling.sampled import (
    EOS,
    PARAMS,
    VOCAB_SIZE,
    MakeSampler,
    make_logits,
    make_peak,
    make_row,
    rows,
)


def test_greedy_takes_the_greatest_logit_and_the_lowest_id_among_equals(
    make_sampler: MakeSampler,
) -> None:
    sampler = make_sampler(make_row(2, [1], temperature=0.0))
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [60, 30]] = 4.0

    sampled = sampler.sample(logits, rows(2))

    assert sampled.token_ids.tolist() == [30]
    assert sampled.token_ids.dtype == np.int64
    assert not sampled.bad_rows
    assert not sampled.logprobs


MIN_TOKENS = {"min_tokens": 2, "stop_token_ids": (7,)}


@pytest.mark.parametrize(
    ("params", "falling", "expected"),
    [
        ({"temperature": 1e-40, "logit_bias": {20: 1e300}}, (20, 40), [20] * 3),
        ({"temperature": 1e-40, "logit_bias": {20: -1e300}}, (20, 40), [40] * 3),
        ({"frequency_penalty": 1.5}, (20, 40), [20, 40, 20]),  # counts what the step before chose
        (MIN_TOKENS, (EOS, 7, 40), [40, 40, EOS]),
        (MIN_TOKENS | {"ignore_eos": True}, (EOS, 7, 40), [40, 40, EOS]),
    ],
)
def test_edits_decide_which_of_the_greatest_logits_is_taken(
    make_sampler: MakeSampler,
    params: dict[str, Any],
    falling: tuple[int, ...],
    expected: list[int],
) -> None:
    sampler = make_sampler(make_row(0, [1], **({"temperature": 0.0} | params)))

    steps = [sampler.sample(make_peak(*falling), rows(0)) for _ in expected]

    assert [step.token_ids.item() for step in steps] == expected
    assert not any(step.bad_rows for step in steps)


@settings(deadline=None)
@given(
    seed=st.integers(0, 1000),
    prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=80),
    outputs=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=80),
    penalty=st.sampled_from([0.6, 1.2, 3.0]),
)
def test_repetition_penalty_equals_transformers(
    make_sampler: MakeSampler, seed: int, prompt: list[int], outputs: list[int], penalty: float
) -> None:
    sampler = make_sampler(
        make_row(0, prompt, outputs, temperature=0.0, repetition_penalty=penalty)
    )
    logits = make_logits(seed)
    expected = RepetitionPenaltyLogitsProcessor(penalty=penalty)(
        torch.tensor([prompt + outputs]), logits.clone()
    )

    sampler.sample(logits, rows(0))

    torch.testing.assert_close(logits, expected)


@settings(deadline=None)
@given(
    prompt=st.lists(st.integers(0, 20), min_size=1, max_size=10),
    outputs=st.lists(st.integers(0, 20), max_size=90),
)
def test_presence_and_frequency_penalties_count_output_only(
    make_sampler: MakeSampler, prompt: list[int], outputs: list[int]
) -> None:
    sampler = make_sampler(
        make_row(0, prompt, outputs, temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    )
    logits = make_logits(3)
    counts = torch.bincount(torch.tensor(outputs, dtype=torch.int64), minlength=VOCAB_SIZE)
    expected = logits - 0.5 * (counts > 0) - 0.25 * counts

    sampler.sample(logits, rows(0))

    torch.testing.assert_close(logits, expected)


@settings(max_examples=40, deadline=None)
@given(params=st.lists(PARAMS, min_size=1, max_size=6), data=st.data())
def test_a_row_gets_the_same_tokens_alone_as_in_any_company_and_order(
    make_sampler: MakeSampler, params: list[dict[str, Any]], data: st.DataObject
) -> None:
    num_steps, num_rows = 6, len(params)
    inits = [make_row(row, [1, 3, row], seed=row, **each) for row, each in enumerate(params)]
    together, alone = make_sampler(*inits), make_sampler(*inits)

    for step in range(num_steps):
        logits = make_logits(step, num_rows)
        order = data.draw(st.permutations(range(num_rows)))
        batch = together.sample(logits[order].clone(), rows(*order))
        singles = [
            alone.sample(logits[row : row + 1].clone(), rows(row)).token_ids.item() for row in order
        ]
        assert batch.token_ids.tolist() == singles


@settings(max_examples=40, deadline=None)
@given(params=PARAMS, num_before=st.integers(1, 9))
def test_a_resumed_row_goes_on_as_an_undisturbed_one(
    make_sampler: MakeSampler, params: dict[str, Any], num_before: int
) -> None:
    def sample(row: int, outputs: list[int], steps: range) -> list[int]:
        sampler = make_sampler(make_row(row, [1, 3, 4], outputs, **params))
        return [sampler.sample(make_logits(step), rows(row)).token_ids.item() for step in steps]

    before = sample(3, [], range(num_before))

    assert before + sample(7, before, range(num_before, 10)) == sample(0, [], range(10))


def test_a_row_that_starts_anew_keeps_nothing_of_the_old_one(make_sampler: MakeSampler) -> None:
    old = make_row(0, [1], temperature=0.0, logit_bias={40: 50.0}, min_tokens=9, logprobs=3)
    sampler = make_sampler(old)
    sampler.sample(make_peak(20), rows(0))
    sampler.drop_row(0)
    sampler.add_row(make_row(0, [1], temperature=0.0))

    sampled = sampler.sample(make_peak(EOS, 20), rows(0))

    assert sampled.token_ids.tolist() == [EOS]
    assert not sampled.logprobs


def test_the_seed_decides(make_sampler: MakeSampler) -> None:
    seeds = (11, 11, 2**64 - 1)
    sampler = make_sampler(*(make_row(row, [1], seed=seed) for row, seed in enumerate(seeds)))

    steps = [sampler.sample(torch.zeros(3, VOCAB_SIZE), rows(0, 1, 2)).token_ids for _ in range(12)]

    first, second, third = np.stack(steps).T.tolist()
    assert first == second
    assert first != third


def test_sampled_tokens_follow_the_distribution(make_sampler: MakeSampler) -> None:
    probs = np.array([0.02, 0.3, 0.08, 0.2, 0.15, 0.05, 0.1, 0.1])
    num_rows, num_steps = 400, 50
    sampler = make_sampler(
        *(make_row(row, [1], seed=row) for row in range(num_rows)),
        max_rows=num_rows,
        vocab_size=len(probs),
    )
    logits = torch.from_numpy(np.log(probs)).float().repeat(num_rows, 1)

    tokens = [
        sampler.sample(logits.clone(), np.arange(num_rows, dtype=np.int32)).token_ids
        for _ in range(num_steps)
    ]

    expected = probs * num_rows * num_steps
    observed = np.bincount(np.concatenate(tokens), minlength=len(probs))
    assert ((observed - expected) ** 2 / expected).sum() < 29.9  # 7 degrees of freedom, p = 1e-4


def test_numbers_are_uniform_over_seeds_and_over_positions() -> None:
    many = np.arange(20_000, dtype=np.uint64)
    one = np.zeros(20_000, np.uint64)

    for bits in (random_bits(many, one), random_bits(one, many), random_bits(many, many)):
        numbers = (bits.view(np.uint64) >> np.uint64(11)) * 2.0**-53
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 50.8  # 19 degrees of freedom, p = 1e-4
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.03


def test_sequences_of_related_seeds_do_not_overlap() -> None:
    steps = np.arange(1000, dtype=np.uint64)
    seeds = np.full(1000, 7, np.uint64)
    one_step_on = seeds + np.uint64(0x9E3779B97F4A7C15)

    shared = np.intersect1d(random_bits(seeds, steps), random_bits(one_step_on, steps))

    assert len(shared) == 0


def test_a_row_that_is_not_finite_is_reported_and_harms_no_other(make_sampler: MakeSampler) -> None:
    inits = [make_row(row, [1], seed=row, top_p=0.9, min_tokens=1) for row in range(4)]
    sampler, clean = make_sampler(*inits), make_sampler(*inits)
    logits = make_logits(0, 4)
    broken = logits.clone()
    broken[1, EOS] = torch.nan
    broken[2, 8] = torch.inf

    sampled = sampler.sample(broken, rows(0, 1, 2, 3))

    expected = clean.sample(logits, rows(0, 1, 2, 3))
    assert sampled.bad_rows.keys() == {1, 2}
    assert sampled.token_ids[[0, 3]].tolist() == expected.token_ids[[0, 3]].tolist()


@pytest.mark.parametrize(
    "params",
    [
        {"stop_token_ids": tuple(range(VOCAB_SIZE))},
        {"stop_token_ids": tuple(ids("a")), "grammar": ToyGrammar(("a",))},
    ],
)
def test_a_row_with_every_token_banned_is_reported(
    make_sampler: MakeSampler, params: dict[str, Any]
) -> None:
    sampler = make_sampler(make_row(0, [1], min_tokens=2, **params))

    assert sampler.sample(make_logits(0), rows(0)).bad_rows == {0: NO_TOKEN_LEFT}


def test_logprobs_are_of_the_raw_logits_and_only_for_rows_that_asked(
    make_sampler: MakeSampler,
) -> None:
    sampler = make_sampler(
        make_row(0, [1], temperature=0.0, logprobs=3, logit_bias={40: 100.0}),
        make_row(1, [1], temperature=0.0),
        make_row(2, [1], temperature=2.0, logprobs=0),
    )
    logits = make_logits(4, 3)
    expected = logits.log_softmax(1)

    sampled = sampler.sample(logits, rows(0, 1, 2))

    first, last = sampled.logprobs[0], sampled.logprobs[2]
    assert sampled.logprobs.keys() == {0, 2}
    assert first.token_ids.tolist() == [40]
    assert first.logprobs.tolist() == pytest.approx([expected[0, 40].item()])
    assert first.ranks.tolist() == [1 + int((expected[0] > expected[0, 40]).sum())]
    assert first.top_ids.tolist() == expected[:1].topk(3).indices.tolist()
    assert first.top_logprobs[0].tolist() == pytest.approx(expected[0].topk(3).values.tolist())
    assert last.top_ids.shape == (1, 0)
    assert last.logprobs.tolist() == pytest.approx([expected[2, sampled.token_ids[2]].item()])


def test_asked_tokens_have_their_log_probabilities_whether_likely_or_not(
    make_sampler: MakeSampler,
) -> None:
    ids = (41, 3, 40)
    sampler = make_sampler(
        make_row(0, [1], temperature=0.0, logprobs=1, logprob_token_ids=ids, logit_bias={7: 100}),
        make_row(1, [1], temperature=0.0, logprobs=1),
        make_row(2, [1], temperature=1.0, logprobs=1, logprob_token_ids=ids),
    )
    logits = make_logits(4, 3)
    expected = logits.log_softmax(1)

    sampled = sampler.sample(logits, rows(0, 1, 2)).logprobs

    for row in (0, 2):
        assert sampled[row].asked_ids.tolist() == [list(ids)]
        own = expected[row, list(ids)].tolist()
        assert sampled[row].asked_logprobs[0].tolist() == pytest.approx(own, abs=1e-5)
        assert sampled[row].top_ids.shape == (1, 1)
    assert sampled[1].asked_ids.size == 0


def test_prompt_logprobs_describe_the_tokens_that_follow(kernels: SamplingKernels) -> None:
    logits = make_logits(1, 4)
    target_ids = np.array([3, 1, 4, 1])

    lines = describe(logits, target_ids, 2, kernels)

    expected = logits.log_softmax(1)
    assert lines.token_ids.tolist() == [3, 1, 4, 1]
    own = expected.gather(1, torch.from_numpy(target_ids)[:, None]).squeeze(1).tolist()
    assert lines.logprobs.tolist() == pytest.approx(own)
    assert lines.top_ids.tolist() == expected.topk(2).indices.tolist()


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"logit_bias": {96: 1.0}}, "logit_bias"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"bad_words_ids": ((3, 96),)}, "bad_words"),
        ({"allowed_token_ids": (96,)}, "allowed_token_ids"),
        ({"first_token_ids": (-2,)}, "first_token_ids"),
    ],
)
def test_tokens_that_the_model_lacks_are_refused(params: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidSampling, match="0 to 95") as caught:
        check_token_ids(make_request("r", **params), VOCAB_SIZE)

    assert caught.value.param == field
