"""Phases of an output: where a thought ends, what a constraint restricts, and when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from remora.configs.errors import InvalidRequest
from remora.engine.sampling.constraint_thread import ConstraintFailed
from remora.engine.sampling.constraints import RowConstraint, is_constrained, mask_words
from remora.engine.types import ReasoningBudget
from tests.engine.sampling.constrained import EOS, MARK, SPELLINGS, VOCAB, ToyGrammar, ids
from tests.engine.sampling.sampled import make_row

WORD = ToyGrammar(("ab", "b", "c"))


def make_constraint(outputs: Sequence[int] = (), **fields: Any) -> RowConstraint:
    return RowConstraint(make_row(0, [10], outputs, **fields), [EOS], VOCAB, SPELLINGS)


def think(budget: int | None = None) -> ReasoningBudget:
    return ReasoningBudget(end="<end>", end_ids=tuple(ids("<e", "nd>")), budget=budget)


def allowed(constraint: RowConstraint) -> set[int]:
    words = np.empty(-(-VOCAB // 32), np.int32)
    constraint.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return set(bits[:VOCAB].nonzero()[0].tolist())


def test_mask_words_hold_one_bit_per_token() -> None:
    words = mask_words([0, 31, 32, 40], 41)

    assert words.dtype == np.int32
    assert words.tolist() == [-(2**31) + 1, 1 + 2**8]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_tokens": 3, "bad_words_ids": ((1,),)}, False),
        ({"grammar": WORD}, True),
        ({"reasoning": think()}, True),
        ({"healed_id": 10}, True),
        ({"allowed_token_ids": (1,)}, True),
        ({"first_token_ids": (1,)}, True),
    ],
)
def test_only_some_rows_are_constrained(fields: dict[str, Any], expected: bool) -> None:
    assert is_constrained(make_row(0, [10], **fields)) == expected


@pytest.mark.parametrize(
    "end", [["<end>"], ["<e", "nd>"], ["<", "end", ">"], ["<", "e", "n", "d>"], ["<e", "nd>\n"]]
)
def test_the_end_of_thought_is_found_however_it_is_cut(end: list[str]) -> None:
    constraint = make_constraint(grammar=WORD, reasoning=think())
    for token_id in ids("q", "<", *end[:-1]):
        constraint.accept(token_id)
    thought = allowed(constraint)

    constraint.accept(ids(end[-1])[0])

    assert thought == set(range(VOCAB)) - {EOS}
    assert allowed(constraint) == set(ids("a", "b", "ab", "abc"))


def test_what_a_token_holds_beyond_the_end_of_thought_is_told_to_the_grammar() -> None:
    constraint = make_constraint(
        ids("<e"), grammar=ToyGrammar(("a", "b", "c", "x")), reasoning=think()
    )

    constraint.accept(ids("nd>abc")[0])

    assert allowed(constraint) == set(ids("x"))
    assert not constraint.is_complete


def test_an_answer_within_that_token_may_complete_the_grammar_or_fail() -> None:
    complete, wrong = (
        make_constraint(ids("<e"), grammar=WORD, reasoning=think()) for _ in range(2)
    )

    complete.accept(ids("nd>abc")[0])

    assert complete.is_complete
    with pytest.raises(ConstraintFailed, match="began an answer"):
        wrong.accept(ids("nd>?")[0])


def test_the_end_is_forced_when_the_budget_is_used_up_and_overrules_bans() -> None:
    constraint = make_constraint(reasoning=think(budget=2))
    seen = []
    for token_id in [*ids("q", "q"), *ids("<e", "nd>")]:
        seen.append((constraint.restricts, constraint.overrules_bans))
        constraint.accept(token_id)

    assert seen == [(False, False), (False, False), (True, True), (True, True)]
    assert constraint.is_spent


def test_reasoning_that_ends_by_itself_is_not_ended_again() -> None:
    assert make_constraint(ids("q", "<end>"), reasoning=think(budget=2)).is_spent


EXIT = ReasoningBudget(end="<end>", end_ids=(MARK,), exit_ids=frozenset({EOS}))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Forced tokens win over first and allowed ones.
        (
            {"reasoning": think(budget=0), "first_token_ids": (12,), "allowed_token_ids": (13,)},
            set(ids("<e")),
        ),
        # Reasoning may hold control tokens, but none that ends the output, except exit tokens.
        (
            {"grammar": WORD, "reasoning": think(), "stop_token_ids": (15,)},
            set(range(VOCAB)) - {EOS, 15},
        ),
        ({"grammar": WORD, "reasoning": EXIT, "stop_token_ids": (15,)}, set(range(VOCAB)) - {15}),
        ({"first_token_ids": (12,)}, {12}),
    ],
)
def test_only_some_tokens_may_come_first(fields: dict[str, Any], expected: set[int]) -> None:
    assert allowed(make_constraint(**fields)) == expected


def test_first_tokens_are_forgotten_after_the_first_token() -> None:
    assert make_constraint([12], first_token_ids=(12,)).is_spent


def test_a_stop_id_of_the_caller_ends_the_row_without_the_grammar() -> None:
    constraint = make_constraint(ids("a"), grammar=WORD, stop_token_ids=(MARK,))

    constraint.accept(MARK)

    assert not constraint.is_complete


def test_a_token_that_the_grammar_refuses_fails() -> None:
    constraint = make_constraint(grammar=WORD)

    with pytest.raises(ConstraintFailed, match="refuses token"):
        constraint.accept(ids("c")[0])


def test_what_is_healed_is_written_in_one_token_or_in_several() -> None:
    constraint = make_constraint(healed_id=ids("the")[0])
    at_first = allowed(constraint)

    constraint.accept(ids("th")[0])
    then = allowed(constraint)
    constraint.accept(ids("e")[0])

    assert at_first == set(ids("t", "th", "the", "then", "there"))
    assert then == set(ids("e", "end"))
    assert constraint.is_spent


@pytest.mark.parametrize(
    "fields", [{"end": "", "end_ids": (1,)}, {"end": "x", "end_ids": ()}, {"budget": -1}]
)
def test_impossible_reasoning_budgets_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        ReasoningBudget(**({"end": "x", "end_ids": (1,)} | fields))
