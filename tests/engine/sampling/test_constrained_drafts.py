"""Constrained rows with drafts: what comes out is what comes out without them."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from remora.engine.grammar.constraint import ConstraintKind
from remora.engine.grammar.vocabulary import Vocabulary
from remora.engine.types import Grammar, Request
from tests.engine.grammar.walks import BACKENDS, make_grammar
from tests.engine.sampling.constrained import (
    EOS,
    MARK,
    TEXTS,
    VOCAB,
    BrokenGrammar,
    ConstrainedEngine,
    ToyGrammar,
    ids,
    make_request,
)
from tests.engine.spec.proposers import Guess

LETTERS = Vocabulary(
    tokens=tuple(
        b"" if place in (EOS, MARK) else text.encode() for place, text in enumerate(TEXTS)
    ),
    end_ids=(EOS,),
)
K = ConstraintKind
WORD, LOOP = ToyGrammar(("ab", "cde", "xyz")), ToyGrammar(("ab", "cd"), loops=True)
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "the", "schema": {"enum": ["a", 1]}, "end": "end"}],
    "triggers": ["the"],
}
SOURCES = {
    "words": (K.REGEX, "[a-z]{3,9}( [a-z]+)*[?!]"),
    "bounded": (K.REGEX, "(?:th|en|ab){2,5}"),
    "choice": (K.CHOICE, '["the", "then there", "there", "abc abc abc"]'),
    "nested": (K.EBNF, 'root ::= "a" root "b" | "c" [a-z]* "d"'),
    "tags": (K.STRUCTURAL_TAG, json.dumps(TAG)),
}
ONLY_XGRAMMAR = {"nested", "tags"}
EDITS: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.8,
    "top_k": 5,
    "top_p": 0.8,
    "bad_words_ids": (tuple(ids("a")), tuple(ids("b", "c")), tuple(ids("<e"))),
    "logit_bias": {ids("the")[0]: 3.0, EOS: 2.0},
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Few logits: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def grammar(backend: str, name: str) -> Grammar:
    kind, source = SOURCES[name]
    return make_grammar(backend, kind, source, LETTERS)


def constraint(rng: random.Random) -> dict[str, Any]:
    """A constraint of any kind."""
    backend = rng.choice(BACKENDS)
    names = sorted(set(SOURCES) - (set() if backend == "xgrammar" else ONLY_XGRAMMAR))
    chosen = rng.choice([WORD, LOOP, grammar(backend, rng.choice(names))])
    thought = {"budget": rng.randrange(7)} if rng.random() < 0.7 else {"thinks": True}
    return rng.choice(
        [
            {"grammar": chosen},
            {"grammar": chosen} | thought,
            thought,
            {"allowed_token_ids": (*ids("a", "b", "c", "th", "the"), EOS)},
            {"first_token_ids": tuple(ids("q", "the"))},
            {"first_token_ids": tuple(ids("a", "ab", "th")), "grammar": chosen},
            {"heal": True, "prompt": ids("a", rng.choice(["th", "the", "<", "z"]))},
            {"grammar": BrokenGrammar(rng.randrange(6))},
            {},
        ]
    )


def request(name: str, rng: random.Random) -> Request:
    """A request with a constraint, and any other parameters."""
    fields: dict[str, Any] = {
        "seed": rng.randrange(99),
        "temperature": rng.choice([0.0, 0.6, 1.0, 1.6]),
        "max_tokens": rng.randrange(4, 24),
        "n": rng.choice([1, 1, 2]),
        "ignore_eos": rng.random() < 0.5,
        "logprobs": rng.choice([None, 0, 2]),
        "min_tokens": rng.choice([0, 0, 4]),
        "stop_token_ids": rng.choice([(), (), tuple(ids("d", "zz"))]),
    }
    edits = {name: value for name, value in EDITS.items() if rng.random() < 0.25}
    return make_request(name, **(fields | edits | constraint(rng)))


def run(requests: list[Request], guess: Guess | None = None, **plan: Any) -> ConstrainedEngine:
    done = ConstrainedEngine(guess, **plan)
    for each in requests:
        done.engine.add(each)
    done.run()
    assert done.engine.stats().num_held_pages == 0
    return done


def texts_of(requests: list[Request], done: ConstrainedEngine) -> list[list[int]]:
    """The prompts and outputs of all sequences."""
    prompts = {each.request_id: list(each.kept_prompt_ids) for each in requests}
    return [prompts[name] + tokens for (name, _), tokens in done.tokens.items()]


def replay(texts: list[list[int]]) -> Guess:
    """What came after the same tokens before."""

    def guess(known: list[int], limit: int) -> list[int]:
        text = next((text for text in texts if text[: len(known)] == known), known)
        return text[len(known) : len(known) + limit]

    return guess


def spoilt(texts: list[list[int]]) -> Guess:
    """The same, of which one draft in three is another token."""
    right = replay(texts)
    return lambda known, limit: [
        token if (len(known) + place) % 3 else (token + 1) % VOCAB
        for place, token in enumerate(right(known, limit))
    ]


def hostile(texts: list[list[int]]) -> Guess:
    """Ends, marks and tokens beyond the end of a text."""
    right = replay(texts)

    def guess(known: list[int], limit: int) -> list[int]:
        wrong = random.Random(len(known)).choices(
            [EOS, MARK, VOCAB, -1, *ids("<e", "nd>", "nd>?", "nd>abc", "a", "the")], k=limit
        )
        return [*right(known, len(known) % 3), *wrong]

    return guess


def at_random(texts: list[list[int]]) -> Guess:
    """Any tokens."""
    return lambda known, limit: random.Random(sum(known)).choices(range(VOCAB), k=limit)


GUESSES: tuple[Callable[[list[list[int]]], Guess], ...] = (replay, spoilt, hostile, at_random)


@pytest.mark.parametrize("seed", range(3))
def test_output_is_that_without_drafts(seed: int) -> None:
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    for case in range(12):
        requests = [request(f"{case}-{number}", rng) for number in range(rng.randrange(2, 6))]
        plain = run(requests, num_pages=80)
        texts = texts_of(requests, plain)
        for number, make_guess in enumerate(GUESSES):
            is_tight = (case + number) % 2 == 0
            room = {"num_pages": 9, "conservativeness": 0.05} if is_tight else {"num_pages": 80}

            drafted = run(requests, make_guess(texts), **room)

            for what in ("tokens", "ends", "stops", "errors", "logprobs"):
                assert getattr(drafted, what) == getattr(plain, what), (what, make_guess.__name__)
            stats = drafted.engine.stats()
            counts["preemptions"] += stats.preemptions_total
            counts[make_guess.__name__] += stats.accepted_drafts_total
    assert min(counts["preemptions"], counts["hostile"]) > 0
    assert min(counts["replay"], counts["spoilt"]) > 50


def test_an_answer_that_fails_behind_drafts_leaves_the_tokens_before_it() -> None:
    allowed = tuple(ids("q", "<e", "nd>?"))
    requests = [
        make_request(
            f"{seed}", thinks=True, grammar=WORD, allowed_token_ids=allowed, seed=seed, logprobs=0
        )
        for seed in range(8)
    ]
    plain = run(requests, num_pages=80)

    drafted = run(requests, replay(texts_of(requests, plain)), num_pages=80)

    assert "began an answer" in plain.errors["0", 0]
    assert drafted.errors == plain.errors
    assert drafted.tokens == plain.tokens
    assert drafted.logprobs == plain.logprobs
    assert drafted.engine.stats().accepted_drafts_total > 8
