"""Real models: ids, log-probabilities and ends with drafts are those without, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, cast

import pytest

from remora.engine.grammar.constraint import Constraint, ConstraintKind
from remora.engine.llm import LLM, Generation, SamplingParams
from remora.engine.runner.runner import LocalRunner
from remora.engine.spec.speculation import Speculation
from remora.lora.setup import pooling
from tests.conftest import TinyCheckpoints
from tests.engine.spec.proposers import FixedController, Guess, GuessingProposer, replaying
from tests.lora.adapters import make_adapter

PROMPTS = [list(range(3, 40)), [7, 8, 9], [11, 7, 8, 9, 11, 7, 8]]
COUNT = 24
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "sampled": {"temperature": 0.8, "seed": 3, "logprobs": 0},
    "filters": {"temperature": 1.3, "seed": 4, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "temperature": 0.7,
        "seed": 5,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logprobs": 1,
    },
    "edits": {
        "temperature": 0.0,
        "logit_bias": {9: 3.0, 4: -100.0},
        "bad_words_ids": ((11,), (7, 8)),
        "min_tokens": 6,
        "stop_token_ids": tuple(range(20, 60)),
    },
    "allowed": {
        "temperature": 1.0,
        "seed": 6,
        "n": 2,
        "allowed_token_ids": tuple(range(3, 500)),
        "first_token_ids": (9, 30, 40),
        "logprobs": 0,
    },
}
WORDS = Constraint(kind=ConstraintKind.REGEX, source="(?:[a-z]{2,9} ){3,40}[.!]")


def replayed(generations: Sequence[Generation], every: int) -> Guess:
    """What was generated after the same tokens before; one draft in `every` is another token."""
    return replaying(
        [
            generation.prompt_token_ids + completion.token_ids
            for generation in generations
            for completion in generation.completions
        ],
        every,
    )


def generate(
    llm: LLM,
    guess: Guess | None = None,
    *,
    constraint: Constraint | None = None,
    adapters: Sequence[str | None] = (None,),
    **changes: Any,
) -> list[Generation]:
    """Generate for each prompt with each of PARAMS at once, perhaps with drafts.

    adapters:  used in turns
    """
    engine = llm._engine
    speculation = None
    if guess is not None:
        speculation = Speculation(
            GuessingProposer(guess),
            FixedController(5),
            source="guess",
            max_drafts=5,
            vocab_size=engine._vocab_size,
            eos_token_ids=llm.tokenizer.eos_token_ids,
            possible_drafts=cast("LocalRunner", engine._runner).possible_drafts,
        )
    engine._scheduler.speculation = speculation
    engine.flush_cache()
    params = [
        SamplingParams(**({"max_tokens": COUNT, "ignore_eos": True} | each | changes))
        for name, each in PARAMS.items()
        if constraint is None or name != "allowed"  # together they may leave no token
        for _ in PROMPTS
    ]
    names = list(islice(cycle(adapters), len(params)))
    done = llm.generate(
        PROMPTS * (len(params) // len(PROMPTS)), params, adapter=names, constraint=constraint
    )
    engine.check_integrity()
    if speculation is not None:
        assert speculation.counts.num_accepted > COUNT
    return done


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": "float32"}),
        ("llama", {"dtype": "bfloat16"}),
        ("llama", {"dtype": "bfloat16", "quantization": "int8"}),
        ("llama", {"dtype": "bfloat16", "kv_tokens": 128, "schedule_conservativeness": 0.05}),
        ("mistral", {"dtype": "float32"}),
        ("qwen3-moe", {"dtype": "bfloat16"}),
        ("deepseek-v3", {"dtype": "float32"}),
    ],
)
def test_native_kernels_give_the_same_bits(
    tiny_checkpoints: TinyCheckpoints, family: str, options: dict[str, Any]
) -> None:
    common: dict[str, Any] = {
        "cpu_kernels": "native",
        "num_threads": 1,
        "kv_tokens": 2048,
        "max_running_requests": 8,
    }
    llm = LLM(str(tiny_checkpoints(family)), show_progress=False, **(common | options))

    plain = generate(llm)

    for every in (1000, 3):
        drafted = generate(llm, replayed(plain, every))
        assert [each.completions for each in drafted] == [each.completions for each in plain]
    llm.close()


@pytest.mark.parametrize("what", ["grammar", "adapters"])
def test_constrained_and_adapted_rows_give_the_same_bits(
    what: str, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("llama")
    keys: dict[str, Any] = {}
    more: dict[str, Any] = {"constraint": WORDS}
    if what == "adapters":
        for seed, name in enumerate(("a", "b")):
            make_adapter(
                path, tmp_path / name, seed=seed, r=8, target_modules=["q_proj", "up_proj"]
            )
        keys["adapting"] = pooling({name: tmp_path / name for name in ("a", "b")}, num_slots=2)
        more = {"adapters": ["a", None, "b", "a"]}
    llm = LLM(
        str(path),
        show_progress=False,
        cpu_kernels="native",
        dtype="bfloat16",
        num_threads=1,
        kv_tokens=2048,
        max_running_requests=8,
        **keys,
    )

    plain = generate(llm, **more)

    for every in (1000, 3):
        drafted = generate(llm, replayed(plain, every), **more)
        assert [each.completions for each in drafted] == [each.completions for each in plain]
    llm.close()


def test_torch_gives_the_same_tokens(tiny_checkpoints: TinyCheckpoints) -> None:
    llm = LLM(
        str(tiny_checkpoints("llama")),
        show_progress=False,
        cpu_kernels="torch",
        dtype="float32",
        num_threads=1,
        kv_tokens=2048,
    )

    plain = generate(llm)
    drafted = generate(llm, replayed(plain, 3))

    assert [each.completions[0].token_ids for each in drafted] == [
        each.completions[0].token_ids for each in plain
    ]
    llm.close()


def test_a_configured_engine_drafts_from_its_own_text(tiny_checkpoints: TinyCheckpoints) -> None:
    common: dict[str, Any] = {
        "dtype": "bfloat16",
        "cpu_kernels": "native",
        "num_threads": 1,
        "kv_tokens": 4096,
        "max_running_requests": 20,  # with drafts, more lines of logits than a step has otherwise
        "show_progress": False,
    }
    path = str(tiny_checkpoints("llama"))
    keys = {"method": "ngram", "max_drafts": 8, "shortest_suffix": 1, "adaptive": False}
    prompts = [[3, 4, 5, number] * 3 for number in range(20)]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    plain, drafting = LLM(path, **common), LLM(path, speculation=keys, **common)

    done = drafting.generate(prompts, params)

    assert [each.token_ids for each in done] == [
        each.token_ids for each in plain.generate(prompts, params)
    ]
    assert drafting.stats().draft_tokens_total > drafting.stats().accepted_drafts_total > 0
    plain.close()
    drafting.close()
