"""Constraints as a caller sees them: through preemption, chunks, several outputs, and failures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.configs.errors import InvalidRequest
from remora.engine.types import NO_TOKEN_LEFT, FinishReason, Request
from tests.engine.sampling.constrained import (
    EOS,
    MARK,
    TEXTS,
    BrokenGrammar,
    ConstrainedEngine,
    ToyGrammar,
    ids,
    make_request,
)

WORD = ToyGrammar(("ab", "cde", "xyz"))
LOOP = ToyGrammar(("ab", "cd"), loops=True)


def run(*requests: Request, **plan: Any) -> ConstrainedEngine:
    engine = ConstrainedEngine(**plan)
    for request in requests:
        engine.engine.add(request)
    engine.run()
    return engine


@given(seed=st.integers(0, 500), temperature=st.sampled_from([0.0, 1.0, 2.0]))
def test_an_output_is_in_its_grammar_and_ends_with_its_last_token(
    seed: int, temperature: float
) -> None:
    done = run(make_request("r", grammar=WORD, seed=seed, temperature=temperature))

    assert WORD.accepts(done.text("r"))
    assert done.ends["r", 0] is FinishReason.STOP
    assert done.stops["r", 0] is None
    assert EOS not in done.tokens["r", 0]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_where_a_grammar_may_end_the_end_of_sequence_ends_it(ignore_eos: bool) -> None:
    done = run(make_request("r", grammar=LOOP, max_tokens=100, ignore_eos=ignore_eos))

    assert LOOP.accepts(done.text("r"))
    assert done.ends["r", 0] is FinishReason.STOP
    assert done.stops["r", 0] == EOS


def test_min_tokens_hold_until_the_grammar_is_complete() -> None:
    word = run(make_request("r", grammar=WORD, min_tokens=20))
    loop = run(make_request("r", grammar=LOOP, min_tokens=20, max_tokens=100))

    assert WORD.accepts(word.text("r"))
    assert word.ends["r", 0] is FinishReason.STOP
    assert LOOP.accepts(loop.text("r"))
    assert len(loop.tokens["r", 0]) > 20


def test_a_limit_cuts_a_constrained_output() -> None:
    done = run(make_request("r", grammar=WORD, max_tokens=1))

    assert done.ends["r", 0] is FinishReason.LENGTH


def test_each_of_several_outputs_has_a_matcher_of_its_own() -> None:
    done = run(make_request("r", grammar=LOOP, n=3, max_tokens=100))

    texts = [done.text("r", index) for index in range(3)]
    assert all(LOOP.accepts(text) for text in texts)
    assert len(set(texts)) > 1


def make_mixed() -> list[Request]:
    return [
        make_request("loop", grammar=LOOP, seed=3, max_tokens=40),
        make_request("thought", grammar=LOOP, budget=9, seed=5, max_tokens=40),
        make_request("first", first_token_ids=tuple(ids("q")), seed=6, max_tokens=40),
        make_request("healed", prompt=ids("a", "th"), heal=True, seed=7, max_tokens=40),
        make_request("bad words", bad_words_ids=((12, 13), (14,)), seed=8, max_tokens=40),
        make_request("free", seed=9, max_tokens=40),
    ]


def test_outputs_do_not_depend_on_company_nor_on_preemption() -> None:
    alone = {
        request.request_id: run(request).tokens[request.request_id, 0] for request in make_mixed()
    }

    crowded = run(*make_mixed(), num_pages=14, max_running_requests=4, conservativeness=0.1)

    assert crowded.engine.stats().preemptions_total > 0
    assert {name: crowded.tokens[name, 0] for name in alone} == alone
    assert all(len(tokens) > 1 for tokens in alone.values())


def test_a_prompt_in_chunks_changes_nothing() -> None:
    prompt = ids(*"thequickbrownfoxjumps")
    whole = run(make_request("r", prompt=prompt, grammar=LOOP, max_tokens=50), num_pages=64)

    chunked = run(
        make_request("r", prompt=prompt, grammar=LOOP, max_tokens=50),
        num_pages=64,
        prefill_chunk_tokens=3,
    )

    assert chunked.tokens == whole.tokens


@pytest.mark.parametrize("after", [0, 2])
def test_a_constraint_that_breaks_costs_its_own_row(
    after: int, caplog: pytest.LogCaptureFixture
) -> None:
    alone = run(make_request("free"))

    done = run(make_request("free"), make_request("broken", grammar=BrokenGrammar(after), seed=2))

    assert done.tokens["free", 0] == alone.tokens["free", 0]
    assert done.ends["free", 0] is alone.ends["free", 0]
    assert done.ends["broken", 0] is FinishReason.ABORT
    assert "boom" in done.errors["broken", 0]
    assert len(done.tokens["broken", 0]) == after
    assert "boom" in caplog.text


def test_a_constraint_that_leaves_no_token_ends_its_row_with_an_error() -> None:
    impossible = make_request("r", grammar=WORD, allowed_token_ids=tuple(ids("q")))

    done = run(impossible, make_request("free"))

    assert done.errors == {("r", 0): NO_TOKEN_LEFT.reason}
    assert done.ends["free", 0] is not FinishReason.ABORT


def test_an_aborted_row_leaves_nothing_to_the_next_one() -> None:
    engine = ConstrainedEngine(max_running_requests=1)
    engine.engine.add(make_request("gone", grammar=LOOP, max_tokens=100))
    engine.step()
    engine.abort("gone")
    engine.engine.add(make_request("free"))

    engine.run()

    assert engine.tokens["free", 0] == run(make_request("free")).tokens["free", 0]


@given(seed=st.integers(0, 300), budget=st.integers(0, 6))
def test_thought_keeps_its_budget_and_the_answer_its_grammar(seed: int, budget: int) -> None:
    done = run(make_request("r", grammar=WORD, budget=budget, seed=seed, max_tokens=60))

    _, mark, answer = done.text("r").partition("<end>")
    if ("r", 0) in done.errors:
        assert "began an answer" in done.errors["r", 0]
        return
    assert mark
    assert WORD.accepts(answer.lstrip())
    answer_tokens = len([t for t in done.tokens["r", 0] if TEXTS[t] in tuple("abcdexyz")])
    assert len(done.tokens["r", 0]) <= budget + 2 + answer_tokens
    assert EOS not in done.tokens["r", 0]


def test_thought_alone_is_cut_at_its_budget_and_the_answer_is_free() -> None:
    free = run(make_request("free", seed=4, max_tokens=40, ignore_eos=True))

    done = run(make_request("r", budget=5, seed=4, max_tokens=40, ignore_eos=True))

    tokens = done.tokens["r", 0]
    assert tokens[:5] == free.tokens["free", 0][:5]
    assert tokens[5:7] == ids("<e", "nd>")
    assert len(tokens) == 40


@given(seed=st.integers(0, 300), last=st.sampled_from(["th", "the", "<", "é", "z"]))
def test_a_healed_prompt_is_gone_on_with_its_own_text(seed: int, last: str) -> None:
    done = run(make_request("r", prompt=ids("a", last), heal=True, seed=seed, max_tokens=20))

    assert done.text("r").startswith(last)


def test_a_control_token_is_healed_by_itself_only() -> None:
    done = run(make_request("r", prompt=[*ids("a"), MARK], heal=True, max_tokens=5))

    assert done.tokens["r", 0][0] == MARK


def test_a_prompt_of_one_token_is_left_alone() -> None:
    plain = run(make_request("r", prompt=ids("th"), max_tokens=9))

    assert run(make_request("r", prompt=ids("th"), heal=True, max_tokens=9)).tokens == plain.tokens


@pytest.mark.parametrize("other", [{"grammar": WORD}, {"budget": 3}, {"prompt_logprobs": 1}])
def test_healing_with_what_it_cannot_go_with_is_refused(other: dict[str, object]) -> None:
    engine = ConstrainedEngine()

    with pytest.raises(InvalidRequest, match="healing"):
        engine.engine.add(make_request("r", heal=True, **other))  # type: ignore[arg-type]


def test_only_allowed_tokens_and_at_first_only_first_tokens_come() -> None:
    allowed = ids("a", "b", "c")

    done = run(make_request("r", allowed_token_ids=tuple(allowed), first_token_ids=(allowed[1],)))

    tokens = done.tokens["r", 0]
    assert tokens[0] == allowed[1]
    assert set(tokens) <= set(allowed)
    assert len(set(tokens)) > 1


@given(seed=st.integers(0, 200))
def test_bad_words_are_never_completed(seed: int) -> None:
    allowed = tuple(ids("a", "b", "c"))
    a, b, c = allowed
    bad = ((c,), (a, b), (b, b, a))

    done = run(make_request("r", allowed_token_ids=allowed, bad_words_ids=bad, seed=seed))

    tokens = done.tokens["r", 0]
    runs = [tuple(tokens[at : at + size]) for size in (1, 2, 3) for at in range(len(tokens))]
    assert not set(bad) & set(runs)
