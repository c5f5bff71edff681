"""The whole engine against transformers, on small random checkpoints of every family.

Loaded from disk as a user would, in float32.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from remora.engine.llm import LLM, SamplingParams
from tests.engine.models.oracle import Oracle
from tests.tiny_models import COMMON, FAMILIES

EOS: int = COMMON["eos_token_id"]

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
# The same output, but admission cannot know that it will be of full length.
ENDLESS = SamplingParams(max_tokens=24, temperature=0.0, logit_bias={EOS: -1000.0})
TinyCheckpoints = Callable[[str], Path]


def make_prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random prompts; the first half of each is shared, so that the prefix cache has work."""
    numbers = random.Random(seed)
    shared = [numbers.randrange(10, 250) for _ in range(max(lengths))]
    return [
        shared[: length // 2] + [numbers.randrange(10, 250) for _ in range(length - length // 2)]
        for length in lengths
    ]


def make_llm(path: Path, **options: Any) -> LLM:
    common: dict[str, Any] = {
        "dtype": "float32",
        "kv_tokens": 4096,
        "num_threads": 1,
        "show_progress": False,
    }
    return LLM(str(path), **(common | options))


def ids(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [generation.token_ids for generation in llm.generate(prompts, params)]


@pytest.fixture(scope="module")
def llama(tiny_checkpoints: TinyCheckpoints) -> Path:
    return tiny_checkpoints("llama")


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_equal_transformers(
    family: str, kernels: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    path = tiny_checkpoints(family)
    prompts = make_prompts([1, 5, 16, 33, 70])

    outputs = ids(make_llm(path, prefill_chunk_tokens=32, cpu_kernels=kernels), prompts)

    oracle = Oracle(path, stepwise=family == "dynamic-rope")
    for prompt, output in zip(prompts, outputs, strict=True):
        oracle.assert_greedy(prompt, output)


@pytest.mark.parametrize(
    ("family", "share"), [("llama", 1.0), ("mixtral", 0.8), ("deepseek-v2-lite", 0.8)]
)
def test_a_float16_checkpoint_is_computed_as_it_is(
    family: str, share: float, tiny_checkpoints: Callable[..., Path]
) -> None:
    """Only K and V are rounded, to 11 bits; by that now and then an expert changes.

    share:  of the positions that are compared, those with the smallest errors
    """
    path = tiny_checkpoints(family, dtype=torch.float16)
    prompts = make_prompts([1, 16, 70])
    llm = make_llm(path, dtype="auto", cpu_kernels="native")

    generations = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0.0, logprobs=1))

    assert llm.plan.dtype == "float16"
    oracle = Oracle(path)
    for prompt, generation in zip(prompts, generations, strict=True):
        assert generation.logprobs is not None
        found = torch.tensor([line.logprob for line in generation.logprobs])
        expected = oracle.logprobs([*prompt, *generation.token_ids], len(prompt))
        assert (found - expected).abs().quantile(share) < 0.02
    llm.close()


VARIANTS: dict[str, dict[str, Any]] = {
    "torch": {"cpu_kernels": "torch"},
    "two threads": {"num_threads": 2},
    "unchunked": {"prefill_chunk_tokens": 2048, "max_step_tokens": 4096},
    "small chunks": {"prefill_chunk_tokens": 7, "max_step_tokens": 40},
    "small pages": {"page_size": 1},
    "large pages": {"page_size": 64},
    "no prefix cache": {"prefix_cache": False},
    "two rows": {"max_running_requests": 2},
    "preempted": {"kv_tokens": 240, "schedule_conservativeness": 0.05},
}


MANY = make_prompts([3, 17, 40, 80, 9, 100, 64, 31] * 4)


@pytest.fixture(scope="module")
def alone(llama: Path) -> list[list[int]]:
    """What the first of MANY come to, each in an engine of its own."""
    return [ids(make_llm(llama), [prompt])[0] for prompt in MANY[:8]]


@pytest.mark.parametrize("variant", VARIANTS)
def test_ids_do_not_depend_on_how_the_work_is_cut(
    variant: str, llama: Path, alone: list[list[int]]
) -> None:
    llm = make_llm(llama, **VARIANTS[variant])
    outputs = ids(llm, MANY, ENDLESS)

    oracle = Oracle(llama)
    for number, (prompt, output) in enumerate(zip(MANY, outputs, strict=True)):
        if number < len(alone):
            oracle.assert_same(prompt, alone[number], output)
        else:
            oracle.assert_greedy(prompt, output)
    if variant == "preempted":
        assert llm.stats().preemptions_total > 0


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "deepseek-v3"])
def test_a_cached_prefix_changes_nothing(family: str, tiny_checkpoints: TinyCheckpoints) -> None:
    llm = make_llm(tiny_checkpoints(family))
    prompts = make_prompts([50, 90, 33])

    first = llm.generate(prompts, GREEDY)
    again = llm.generate(prompts, GREEDY)

    assert [g.token_ids for g in again] == [g.token_ids for g in first]
    assert [g.num_cached_tokens for g in again] == [48, 80, 32]


SAMPLED = SamplingParams(
    max_tokens=24, temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, seed=7, ignore_eos=True
)


def test_seeded_sampling_is_repeatable_alone_and_in_a_batch(llama: Path) -> None:
    prompts = make_prompts([20, 45, 70])
    alone = [ids(make_llm(llama), [prompt], SAMPLED)[0] for prompt in prompts]

    together = ids(make_llm(llama, prefill_chunk_tokens=16), prompts, SAMPLED)
    others = make_prompts([30, 31, 32], seed=5)
    crowded = ids(make_llm(llama), [*others, *prompts], SAMPLED)[3:]

    assert together == alone
    assert crowded == alone


def test_preemption_does_not_disturb_seeds_or_penalties(llama: Path) -> None:
    params = SamplingParams(
        max_tokens=60,
        temperature=1.0,
        top_k=8,  # a handful of candidates: rounding cannot push the draw over a boundary
        seed=3,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        ignore_eos=False,
    )
    prompts = make_prompts([30, 60, 90, 40, 50, 70])
    expected = ids(make_llm(llama), prompts, params)

    llm = make_llm(llama, kv_tokens=240, schedule_conservativeness=0.05)
    outputs = ids(llm, prompts, params)

    assert llm.stats().preemptions_total > 0
    assert outputs == expected


def test_different_seeds_and_different_indexes_differ(llama: Path) -> None:
    llm = make_llm(llama)
    prompt = make_prompts([20])[0]
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=1, n=3, ignore_eos=True)

    completions = llm.generate([prompt], params)[0].completions

    assert len({tuple(completion.token_ids) for completion in completions}) == 3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logprobs_equal_transformers(family: str, tiny_checkpoints: TinyCheckpoints) -> None:
    path = tiny_checkpoints(family)
    prompts = make_prompts([2, 20, 55])
    params = SamplingParams(
        max_tokens=10, temperature=0.7, seed=5, logprobs=4, prompt_logprobs=3, ignore_eos=True
    )

    generations = make_llm(path, prefill_chunk_tokens=16).generate(prompts, params)

    oracle = Oracle(path)
    for prompt, generation in zip(prompts, generations, strict=True):
        everything = [*prompt, *generation.token_ids]
        expected = oracle.logits(everything[:-1]).log_softmax(-1)
        assert generation.prompt_logprobs is not None
        assert generation.logprobs is not None
        assert generation.prompt_logprobs[0] is None
        lines = [*generation.prompt_logprobs[1:], *generation.logprobs]
        for row, token, line in zip(expected, everything[1:], lines, strict=True):
            assert line is not None
            assert line.token_id == token
            assert line.logprob == pytest.approx(row[token].item(), abs=1e-4)
            values = [value for _, value in line.top]
            assert values == pytest.approx(row.topk(len(values)).values.tolist(), abs=1e-4)
            assert line.rank == int((row > row[token]).sum()) + 1 or line.logprob == pytest.approx(
                values[0], abs=1e-5
            )


def test_eos_ends_the_output_unless_ignored(llama: Path) -> None:
    llm = make_llm(llama)
    prompt = make_prompts([20])[0]
    eos = llm.tokenizer.eos_token_ids[0]
    likely_end: dict[str, Any] = {"logit_bias": {eos: 100.0}, "temperature": 0.0}

    ended = llm.generate([prompt], SamplingParams(max_tokens=8, **likely_end))[0]
    ignored = llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True, **likely_end))[0]
    held = llm.generate([prompt], SamplingParams(max_tokens=8, min_tokens=4, **likely_end))[0]

    assert (ended.finish_reason, ended.token_ids) == ("stop", [eos])
    assert (ignored.finish_reason, ignored.token_ids) == ("length", [eos] * 8)
    assert (held.finish_reason, len(held.token_ids), held.token_ids[-1]) == ("stop", 5, eos)


def test_a_stop_string_cuts_the_text_and_ends_the_work(llama: Path) -> None:
    llm = make_llm(llama)
    prompt = make_prompts([20])[0]
    whole = llm.generate([prompt], GREEDY)[0].text
    stop = whole[len(whole) // 2 :][:3]

    cut = llm.generate(
        [prompt], SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, stop=(stop,))
    )[0]

    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.completions[0].stop_reason == stop
    assert llm.stats().num_held_pages == 0


def bfloat16_error(path: Path) -> float:
    """Return the mean error of a prompt's log-probabilities in bfloat16."""
    prompt = make_prompts([40])[0]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
    lines = make_llm(path, dtype="bfloat16").generate([prompt], params)[0].prompt_logprobs
    assert lines is not None
    got = torch.tensor([line.logprob for line in lines[1:] if line is not None])
    return (got - Oracle(path).logprobs(prompt, 1)).abs().mean().item()


def test_bfloat16_runs_and_stays_close_to_float32(llama: Path) -> None:
    assert bfloat16_error(llama) < 0.15
