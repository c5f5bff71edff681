"""Draft models: outputs are those without drafts, and a model that drafts for itself is right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from remora.configs.errors import ConfigError
from remora.configs.load import parse_args
from remora.configs.planning.draft_plan import draft_config
from remora.engine.grammar.constraint import Constraint, ConstraintKind
from remora.engine.llm import LLM, Generation, SamplingParams
from tests.conftest import TinyCheckpoints

COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "cpu_kernels": "native",
    "num_threads": 1,
    "kv_tokens": 4096,
    "max_running_requests": 8,
    "show_progress": False,
}
# Longer than a page, one of them than a step; two of them begin alike.
PROMPTS = [[3, 4, 5, 6] * 10, [3, 4, 5, 6] * 9 + [8], [7, 8, 9], list(range(3, 90)), [11]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, seed=3, max_tokens=31, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, top_k=20, top_p=0.9, max_tokens=2, n=2),
    SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=tuple(range(40, 70))),
    SamplingParams(temperature=0.7, seed=5, presence_penalty=0.5, max_tokens=17, logprobs=0),
]


def drafting(
    path: Path, draft: Path, *, most: int = 4, draft_quantization: str = "none", **options: Any
) -> LLM:
    """Load a model with a draft model, whose drafts are always as many as are allowed."""
    keys = {
        "method": "draft",
        "draft_model": str(draft),
        "draft_quantization": draft_quantization,
        "max_drafts": most,
        "adaptive": False,
    }
    return LLM(str(path), speculation=keys, **(COMMON | options))


def generate(llm: LLM) -> list[Generation]:
    done = llm.generate(PROMPTS, PARAMS)
    llm._engine.check_integrity()
    return done


def outputs(done: list[Generation]) -> list[Any]:
    return [each.completions for each in done]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32", "max_step_tokens": 32, "prefill_chunk_tokens": 16},
        {"kv_tokens": 128, "schedule_conservativeness": 0.05},  # sequences are preempted
        {"quantization": "int8", "kv_dtype": "int8"},
        {"cpu_kernels": "torch", "dtype": "float32"},
    ],
)
def test_outputs_are_those_without_drafts(
    tiny_checkpoints: TinyCheckpoints, options: dict[str, Any]
) -> None:
    path, other = tiny_checkpoints("llama"), tiny_checkpoints("qwen2")
    plain = LLM(str(path), **(COMMON | options))
    drafted = drafting(path, other, **options)

    want, got = generate(plain), generate(drafted)

    if options.get("cpu_kernels") == "torch":  # whose bits depend on the rows of a step
        assert [each.token_ids for each in got] == [each.token_ids for each in want]
    else:
        assert outputs(got) == outputs(want)
    assert drafted.stats().draft_tokens_total > 50
    assert bool(drafted.stats().preemptions_total) == (options.get("kv_tokens") == 128)
    plain.close()
    drafted.close()


def test_a_draft_model_does_not_know_constraints_and_outputs_keep_them(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    path = tiny_checkpoints("llama")
    words = Constraint(kind=ConstraintKind.REGEX, source="(?:[a-z]{2,9} ){3,40}[.!]")
    params = [
        SamplingParams(temperature=temperature, seed=8, max_tokens=40, min_tokens=3, logprobs=1)
        for temperature in (0.0, 1.0, 0.7, 0.0, 1.3)
    ]
    plain, llm = LLM(str(path), **COMMON), drafting(path, path)

    done = llm.generate(PROMPTS, params, constraint=words)

    assert outputs(done) == outputs(plain.generate(PROMPTS, params, constraint=words))
    assert 0 < llm.stats().accepted_drafts_total < llm.stats().draft_tokens_total
    plain.close()
    llm.close()


@pytest.mark.observes("speculation.draft_model")
@pytest.mark.parametrize("family", ["llama", "mistral", "deepseek-v3", "qwen3-moe"])
def test_a_model_that_drafts_for_itself_is_always_right(
    tiny_checkpoints: TinyCheckpoints, family: str
) -> None:
    path = tiny_checkpoints(family)
    llm = drafting(path, path, most=5)
    # With this seed no sequence draws an end token, which is never a draft.
    params = [
        SamplingParams(temperature=temperature, seed=9, max_tokens=30, ignore_eos=True)
        for temperature in (0.0, 1.0, 0.6, 0.0, 0.9)
    ]

    llm.generate(PROMPTS, params)
    speculation = llm._engine._scheduler.speculation
    assert speculation is not None
    assert speculation.counts.num_accepted == speculation.counts.num_drafts > 100

    # Pages that were cached while no row had drafts lack what the draft model computes.
    llm._engine.flush_cache()
    llm._engine._scheduler.speculation = None
    llm.generate(PROMPTS, params)
    llm._engine._scheduler.speculation = speculation
    done = llm.generate(PROMPTS, params)
    assert sum(each.num_cached_tokens for each in done) > 0
    assert speculation.counts.num_accepted == speculation.counts.num_drafts > 200
    llm.close()


def test_a_vocabulary_with_other_tokens_is_refused(
    tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    path = tiny_checkpoints("llama")
    other = shutil.copytree(path, tmp_path / "other")
    file = other / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab |= {text: vocab["a"] + vocab["b"] - vocab[text] for text in "ab"}
    file.write_text(json.dumps(tokenizer))

    chosen: tuple[dict[str, Any], ...] = ({}, {"tokenizer_path": str(path)})  # the model's own
    for keys in chosen:
        with pytest.raises(ConfigError, match=r"speculation.draft_model: its tokenizer .* vocab"):
            drafting(path, other, **keys)


def test_what_the_configuration_says_of_the_model_is_not_said_of_its_draft_model() -> None:
    config = parse_args(
        {
            "model": {
                "path": "/m",
                "dtype": "float32",
                "checkpoint_formats": ["awq"],
                "impl": "transformers",
                "eos_token_ids": [3],
                "trust_remote_code": True,
            },
            "speculation": {"method": "draft", "draft_model": "/d", "draft_quantization": "int8"},
        }
    )
    found = draft_config(config).model
    assert (found.path, found.dtype, found.quantization) == ("/d", "float32", "int8")
    assert (found.checkpoint_formats, found.impl, found.eos_token_ids) == ([], "auto", None)
    assert found.trust_remote_code


def test_sequences_beyond_the_draft_models_positions_have_no_drafts(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    path = tiny_checkpoints("llama")
    short = tiny_checkpoints("qwen2", max_position_embeddings=48)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    plain, llm = LLM(str(path), **COMMON), drafting(path, short)

    done = llm.generate([3, 4, 5], params)

    assert outputs(done) == outputs(plain.generate([3, 4, 5], params))
    assert 0 < llm.stats().draft_tokens_total <= 48 * 4
    assert llm.stats().steps_total >= 60 - 48
    plain.close()
    llm.close()


@pytest.mark.observes("speculation.draft_quantization")
def test_weights_and_pages_of_the_draft_model_are_part_of_the_plan(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    path = tiny_checkpoints("llama")
    plain, llm = LLM(str(path), **COMMON), drafting(path, path)
    rounded = drafting(path, path, draft_quantization="int8")
    assert llm.plan.draft is not None
    assert rounded.plan.draft is not None
    assert llm.plan.kv_bytes == 2 * plain.plan.kv_bytes
    assert llm.plan.draft.kv_bytes == plain.plan.kv_bytes
    assert llm.plan.draft.weight_bytes == plain.plan.weight_bytes
    assert rounded.plan.draft.weight_bytes < 0.7 * llm.plan.draft.weight_bytes
    assert rounded.plan.weight_bytes == plain.plan.weight_bytes
    for each in (plain, llm, rounded):
        each.close()
