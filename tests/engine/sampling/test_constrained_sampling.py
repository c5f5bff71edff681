"""The sampler of rows with a constraint: masks among the other steps, and whose fault it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.engine.types import ReasoningBudget
from tests.engine.sampling.constrained import EOS as END_OF_SEQUENCE
from tests.engine.sampling.constrained import VOCAB, BrokenGrammar, ToyGrammar
from tests.engine.sampling.sampled import (
    PARAMS,
    MakeSampler,
    make_logits,
    make_peak,
    make_row,
    rows,
)

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
    free_rows = [make_row(row, [1, 3, row], seed=row, **each) for row, each in enumerate(params)]
    constrained = [
        make_row(row, [1], seed=row, **constraint)
        for row, constraint in enumerate(CONSTRAINED, num_free)
    ]
    free = make_sampler(*free_rows, vocab_size=VOCAB)
    mixed = make_sampler(*free_rows, *constrained, vocab_size=VOCAB)

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
    bias = {30: 5.0, 50: 90.0}
    sampler = make_sampler(
        make_row(0, [1], temperature=0.0, allowed_token_ids=(20, 30), logit_bias=bias, logprobs=1)
    )
    logits = make_peak(40, 20)
    expected = logits.log_softmax(1)

    sampled = sampler.sample(logits, rows(0))

    assert sampled.token_ids.tolist() == [20]
    assert sampled.logprobs[0].top_ids.tolist() == [[40]]
    assert sampled.logprobs[0].logprobs.tolist() == pytest.approx([expected[0, 20].item()])


def test_a_grammar_of_nothing_ends_at_once_whatever_is_banned(make_sampler: MakeSampler) -> None:
    empty = make_row(0, [1], grammar=ToyGrammar(()), min_tokens=5)
    sampler = make_sampler(empty, vocab_size=VOCAB)

    sampled = sampler.sample(make_logits(0, 1, VOCAB), rows(0))

    assert sampled.token_ids.tolist() == [END_OF_SEQUENCE]
    assert sampled.completed == {0}


def test_a_row_whose_constraint_fails_on_its_token_is_reported_and_no_other(
    make_sampler: MakeSampler,
) -> None:
    grammars = (WORD, BrokenGrammar(after=0))
    inits = [make_row(row, [1], grammar=grammar) for row, grammar in enumerate(grammars)]
    sampler = make_sampler(*inits, vocab_size=VOCAB)

    sampled = sampler.sample(make_logits(0, 2, VOCAB), rows(0, 1))

    assert sampled.bad_rows.keys() == {1}
    assert "boom" in sampled.bad_rows[1].reason
