"""Every way to sample, with every kind of weights and proposer: the bits are those without drafts.

240 cases: 4 kinds of weights and KV, 3 proposers, and 20 requests that run together: 3 ways to
choose a token, each with 6 other settings, and 2 more under a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from remora.engine.grammar.constraint import Constraint, ConstraintKind
from remora.engine.llm import LLM, Generation, SamplingParams
from remora.engine.runner.runner import LocalRunner
from remora.engine.spec.ngram import NgramProposer
from remora.engine.spec.proposer import Proposer
from remora.engine.spec.speculation import Speculation
from remora.engine.types import Namespace
from tests.conftest import TinyCheckpoints
from tests.engine.spec.proposers import FixedController, GuessingProposer

COUNT = 20
PROMPTS = ([3, 4, 5, 6] * 5, [7, 8, 9], list(range(3, 40)))
CHOICES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.2, "seed": 4, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"logprobs": 2, "logprob_token_ids": (5, 250, 9)},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logprobs": 0},
    {"logit_bias": {9: 3.0, 4: -100.0}, "bad_words_ids": ((11,), (7, 8)), "logprobs": 1},
    {"min_tokens": 6, "stop_token_ids": tuple(range(20, 120))},
    {"stop": ("e", "in")},
    {"n": 2, "allowed_token_ids": tuple(range(3, 300)), "logprobs": 0},
)
PARAMS = [
    SamplingParams(**({"max_tokens": COUNT, "ignore_eos": True} | choice | setting))
    for choice in CHOICES
    for setting in SETTINGS
]
GUIDED = [SamplingParams(**choice, max_tokens=COUNT, logprobs=1) for choice in CHOICES[:2]]
WORDS = Constraint(kind=ConstraintKind.REGEX, source="(?:[a-z]{2,9} ){3,40}[.!]")


def generate(llm: LLM) -> list[Generation]:
    llm._engine.flush_cache()
    prompts = [PROMPTS[number % 3] for number in range(len(PARAMS))]
    done = [
        *llm.generate(prompts, PARAMS),
        *llm.generate(list(PROMPTS[:2]), GUIDED, constraint=WORDS),
    ]
    llm._engine.check_integrity()
    return done


def texts_of(done: Sequence[Generation]) -> list[list[int]]:
    return [
        each.prompt_token_ids + completion.token_ids
        for each in done
        for completion in each.completions
    ]


def replaying(texts: list[list[int]]) -> GuessingProposer:
    """Outputs without drafts, one token in three of them another one."""

    def guess(known: list[int], limit: int) -> list[int]:
        for text in texts:
            if text[: len(known)] == known:
                found = text[len(known) : len(known) + limit]
                return [token ^ ((len(known) + at) % 3 == 0) for at, token in enumerate(found)]
        return []

    return GuessingProposer(guess)


def looking_up(texts: list[list[int]], max_shared_bytes: int | None) -> NgramProposer:
    """N-grams; the store, if there is one, has half of the outputs without drafts."""
    proposer = NgramProposer(
        shortest=1, longest=4, max_bytes=2**20, max_shared_bytes=max_shared_bytes
    )
    for key, text in enumerate(texts[::2]):
        proposer.begin(-1 - key, text, Namespace())
        proposer.end(-1 - key)
    return proposer


@pytest.mark.parametrize(
    "kind",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"dtype": "bfloat16", "kv_dtype": "int8"},
    ],
)
def test_outputs_are_those_without_drafts(
    kind: dict[str, str], tiny_checkpoints: TinyCheckpoints
) -> None:
    llm = LLM(
        str(tiny_checkpoints("llama")),
        show_progress=False,
        cpu_kernels="native",
        num_threads=1,
        kv_tokens=4096,
        max_running_requests=10,  # 6 rows of logits each: no more than a step has without drafts
        **cast("dict[str, Any]", kind),
    )
    engine = llm._engine
    plain = generate(llm)
    texts = texts_of(plain)
    assert len(plain) == 20

    proposers: list[Proposer] = [
        replaying(texts),
        looking_up(texts, None),
        looking_up(texts, 2**20),
    ]
    accepted = []
    for proposer in proposers:
        engine._scheduler.speculation = speculation = Speculation(
            proposer,
            FixedController(5),
            max_drafts=5,
            source="texts",
            vocab_size=engine._vocab_size,
            eos_token_ids=llm.tokenizer.eos_token_ids,
            possible_drafts=cast("LocalRunner", engine._runner).possible_drafts,
        )
        drafted = generate(llm)
        for number, (with_drafts, without) in enumerate(zip(drafted, plain, strict=True)):
            assert with_drafts.completions == without.completions, f"request {number}"
        assert speculation.counts.num_drafts > COUNT
        accepted.append(speculation.counts.num_accepted)
    assert accepted[0] > COUNT
    assert accepted[2] > COUNT + accepted[1]  # the model repeats earlier outputs, not itself
    llm.close()
