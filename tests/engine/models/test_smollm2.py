"""The default model against transformers, in float32: real weights, real text, real lengths."""

from __future__ import annotations

import pytest

from remora.engine.llm import LLM, Generation, SamplingParams
from tests.conftest import NUM_THREADS
from tests.engine.models.oracle import Oracle

pytestmark = pytest.mark.timeout(900)

MAX_TOKENS = 32  # past the ends of two pages, wherever they begin
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child. 🌱🌞",
    "用中文写一句问候。",
    "日本の首都はどこですか？",
    "Fix this code:\n```python\ndef add(a, b)\n    retrun a + b\n```",
    "List three prime numbers greater than 1000.",
    "Who wrote 'Faust'?",
    "Translate to German: 'The weather is nice today.'",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "SELECT name FROM users WHERE -- what does this do?",
    "😀😃😄😁 continue the sequence",
)
RAW = (
    "The quick brown fox",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8, 13,",
    "#include <stdio.h>\nint main(void) {",
    "El perro de San Roque no tiene",
    "人工智能的未来是",
    "Привет, как",
    '{"name": "Ada", "born":',
    "🚀🚀🚀",
    "a",
    "   leading spaces and\ttabs",
    "CHAPTER I.\n\nIt was a dark and stormy night;",
)
PARAGRAPH = (
    "The engine room was warm and loud. Gauges lined the wall, each with its own small lamp, and "
    "the night shift walked from one to the next, writing numbers into a book that nobody read. "
)


@pytest.fixture(scope="module")
def llm(smollm2_path: object) -> LLM:
    return LLM(
        str(smollm2_path),
        dtype="float32",
        kv_tokens=40_000,
        num_threads=NUM_THREADS,
        show_progress=False,
    )


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    """30 prompts: 12 questions in chat form, 13 raw texts, 5 longer ones, one of 1,500 tokens."""
    chats = [
        llm.tokenizer.encode(
            llm.tokenizer.render_chat([{"role": "user", "content": question}]),
            add_special_tokens=False,
        )
        for question in QUESTIONS
    ]
    raw = [llm.tokenizer.encode(text, add_special_tokens=True) for text in RAW]
    long = llm.tokenizer.encode(PARAGRAPH * 60, add_special_tokens=True)
    return [*chats, *raw, *(long[at : at + size] for at, size in LONG)]


LONG = ((0, 1500), (7, 600), (3, 700), (11, 300), (5, 513))


@pytest.fixture(scope="module")
def batch(llm: LLM, prompts: list[list[int]]) -> list[Generation]:
    """All prompts in one batch of up to 32 rows."""
    return llm.generate(prompts, GREEDY)


@pytest.fixture(scope="module")
def oracle(smollm2_path: object) -> Oracle:
    return Oracle(smollm2_path)


def test_greedy_ids_of_thirty_prompts_equal_transformers(
    batch: list[Generation], prompts: list[list[int]], oracle: Oracle
) -> None:
    assert len(prompts) == 30
    for prompt, generation in zip(prompts, batch, strict=True):
        assert len(generation.token_ids) == MAX_TOKENS
        oracle.assert_greedy(prompt, generation.token_ids)


@pytest.mark.parametrize("number", [0, 5, 15, 27])
def test_ids_alone_equal_ids_in_the_batch(
    number: int, llm: LLM, batch: list[Generation], prompts: list[list[int]], oracle: Oracle
) -> None:
    alone = llm.generate([prompts[number]], GREEDY)[0]

    oracle.assert_same(prompts[number], alone.token_ids, batch[number].token_ids)
    assert alone.num_cached_tokens == (len(prompts[number]) - 1) // 16 * 16


def test_logprobs_equal_transformers(llm: LLM, prompts: list[list[int]], oracle: Oracle) -> None:
    params = SamplingParams(
        max_tokens=16, temperature=0.8, seed=11, logprobs=5, prompt_logprobs=0, ignore_eos=True
    )
    chosen = [prompts[0], prompts[3], prompts[14], prompts[28]]

    for prompt, generation in zip(chosen, llm.generate(chosen, params), strict=True):
        assert generation.prompt_logprobs is not None
        assert generation.logprobs is not None
        lines = [*generation.prompt_logprobs[1:], *generation.logprobs]
        got = [line.logprob for line in lines if line is not None]
        expected = oracle.logprobs([*prompt, *generation.token_ids], 1).tolist()
        assert got == pytest.approx(expected, abs=2e-4)


def test_the_capital_of_france_is_paris(llm: LLM) -> None:
    (answer,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(max_tokens=24, temperature=0.0),
    )

    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
