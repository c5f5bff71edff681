"""The sampler of rows with a constraint: masks among the other steps, and whose fault it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.engine.sampling.token_sampler import NO_TOKEN_LEFT
from remora.engine.types import ReasoningBudget
from tests.engine.sampling.constrained import EOS as END_OF_SEQUENCE
from tests.engine.sampling.constrained import VOCAB, BrokenGrammar, ToyGrammar, ids
from tests.engine.sampling.sampled import (
    PARAMS,
    MakeSampler,
    make_logits,
    make_peak,
    make_row,
    rows,
)


def test_a_request_that_bans_all_that_its_grammar_allows_is_to_blame_itself(
    make_sampler: MakeSampler,
) -> None:
    sampler = make_sampler()
    stops = tuple(ids("a"))
    grammar = ToyGrammar(("a",))
    sampler.add_row(make_row(0, [1], grammar=grammar, min_tokens=2, stop_token_ids=stops))

    assert sampler.sample(make_logits(0), rows(0)).bad_rows == {0: NO_TOKEN_LEFT}


WORD = ToyGrammar(("ab", "cd", "ef"))


CONSTRAINED: list[dict[str, Any]] = [
    {"grammar": WORD},
    {"reasoning": ReasoningBudget(end="x", end_ids=(40,), budget=2)},
    {"allowed_token_ids": (20, 30), "bad_words_ids": ((20, 20), (30,))},
    {"first_token_ids": (7,)},
]


@settings(max_examples=40)
@given(params=st.lists(PARAMS, min_size=1, max_size=4), data=st.data())
def test_rows_without_a_constraint_get_bit_for_bit_what_they_get_without_constrained_company(
    make_sampler: MakeSampler, params: list[dict[str, Any]], data: st.DataObject
) -> None:
    num_free, num_rows = len(params), len(params) + len(CONSTRAINED)
    mixed, free = make_sampler(vocab_size=VOCAB), make_sampler(vocab_size=VOCAB)
    in_vocab = [p | {"logit_bias": {3: 2.0, 40: -100.0}} for p in params]
    for row, row_params in enumerate(in_vocab):
        mixed.add_row(make_row(row, [1, 3, row], seed=row, **row_params))
        free.add_row(make_row(row, [1, 3, row], seed=row, **row_params))
    for row, constraint in enumerate(CONSTRAINED, num_free):
        mixed.add_row(make_row(row, [1], seed=row, **constraint))

    for step in range(3):
        logits = make_logits(step, num_rows, VOCAB)
        order = np.array(data.draw(st.permutations(range(num_rows))), np.int32)
        if data.draw(st.booleans()):
            mixed.begin(order)
        batch = mixed.sample(logits[order].clone(), order)
        alone = order[order < num_free]
        expected = free.sample(logits[alone].clone(), alone)

        assert batch.token_ids[order < num_free].tolist() == expected.token_ids.tolist()
        for row, lines in expected.logprobs.items():
            assert lines.logprobs.tolist() == batch.logprobs[row].logprobs.tolist()
    mixed.close()


def test_a_mask_comes_before_bias_and_logprobs_stay_those_of_the_model(
    make_sampler: MakeSampler,
) -> None:
    sampler = make_sampler()
    sampler.add_row(
        make_row(
            0,
            [1],
            temperature=0.0,
            allowed_token_ids=(20, 30),
            logit_bias={30: 5.0, 50: 90.0},
            logprobs=1,
        )
    )
    logits = make_peak(40, 20)
    expected = logits.log_softmax(1)

    sampled = sampler.sample(logits, rows(0))

    assert sampled.token_ids.tolist() == [20]
    assert sampled.logprobs[0].top_ids.tolist() == [[40]]
    assert sampled.logprobs[0].logprobs.tolist() == pytest.approx([expected[0, 20].item()])


def test_a_grammar_of_nothing_ends_at_once_whatever_is_banned(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(vocab_size=VOCAB)
    sampler.add_row(make_row(0, [1], grammar=ToyGrammar(()), min_tokens=5))

    sampled = sampler.sample(make_logits(0, 1, VOCAB), rows(0))

    assert sampled.token_ids.tolist() == [END_OF_SEQUENCE]
    assert sampled.completed == {0}


def test_a_row_whose_constraint_fails_on_its_token_is_reported_and_no_other(
    make_sampler: MakeSampler,
) -> None:
    sampler = make_sampler(vocab_size=VOCAB)
    sampler.add_row(make_row(0, [1], grammar=WORD))
    sampler.add_row(make_row(1, [1], grammar=BrokenGrammar(after=0)))

    sampled = sampler.sample(make_logits(0, 2, VOCAB), rows(0, 1))

    assert sampled.bad_rows.keys() == {1}
    assert "boom" in sampled.bad_rows[1].reason
