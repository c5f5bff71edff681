"""Log-probabilities of requested tokens through the whole engine: memory, drafts and prompts."""

from __future__ import annotations

import pytest

from remora.configs.errors import InvalidSampling
from remora.engine.llm import LLM, Generation, SamplingParams
from remora.engine.types import TokenLogprob
from tests.conftest import TinyCheckpoints

IDS = (250, 5, 9)
PROMPTS = [[3 + number, 4, 5, 6 + number] * 4 for number in range(5)]
ASKED = SamplingParams(
    temperature=0.0,
    max_tokens=90,
    ignore_eos=True,
    logprobs=1,
    logprob_token_ids=IDS,
)
FULL = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True, logprobs=1024)


@pytest.fixture(scope="module", params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_llm(tiny_checkpoints: TinyCheckpoints, kernels: str, kv_tokens: int) -> LLM:
    return LLM(
        str(tiny_checkpoints("llama")),
        show_progress=False,
        cpu_kernels=kernels,
        num_threads=1,
        dtype="float32",
        kv_tokens=kv_tokens,
        schedule_conservativeness=0.1,
    )


def asked_of(done: list[Generation]) -> list[list[tuple[tuple[int, float], ...]]]:
    return [[line.asked for line in one.completions[0].logprobs or ()] for one in done]


def test_they_are_those_of_the_whole_distribution_also_after_preemption(
    kernels: str, tiny_checkpoints: TinyCheckpoints
) -> None:
    ample = make_llm(tiny_checkpoints, kernels, 4096)
    expected = ample.generate(PROMPTS, [FULL] * len(PROMPTS))
    tight = make_llm(tiny_checkpoints, kernels, 320)
    found = tight.generate(PROMPTS, [ASKED] * len(PROMPTS))

    assert tight._engine.stats().preemptions_total > 0
    for own, whole in zip(found, expected, strict=True):
        assert own.completions[0].token_ids == whole.completions[0].token_ids
        lines = own.completions[0].logprobs or (), whole.completions[0].logprobs or ()
        for line, full in zip(*lines, strict=True):
            assert [token_id for token_id, _ in line.asked] == list(IDS)
            likely = dict(full.top)
            for token_id, logprob in line.asked:
                assert logprob == pytest.approx(likely[token_id], abs=1e-3)
    assert all(len(lines) == 90 for lines in asked_of(found))


def test_prompts_have_them_too(kernels: str, tiny_checkpoints: TinyCheckpoints) -> None:
    llm = make_llm(tiny_checkpoints, kernels, 1024)
    both = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True}
    asked = SamplingParams(**both, prompt_logprobs=0, logprob_token_ids=IDS)  # type: ignore[arg-type]
    full = SamplingParams(**both, prompt_logprobs=1024)  # type: ignore[arg-type]

    own, whole = llm.generate([PROMPTS[0]] * 2, [asked, full])

    lines = _known(own)
    assert len(lines) == len(PROMPTS[0]) - 1
    for line, other in zip(lines, _known(whole), strict=True):
        likely = dict(other.top)
        for token_id, logprob in line.asked:
            assert logprob == pytest.approx(likely[token_id], abs=1e-3)


def _known(done: Generation) -> list[TokenLogprob]:
    return [line for line in done.prompt_logprobs or () if line is not None]


def test_faults_name_the_field() -> None:
    for fields in ({}, {"logprobs": 0, "logprob_token_ids": tuple(range(1025))}):
        with pytest.raises(InvalidSampling) as caught:
            SamplingParams(**({"logprob_token_ids": (1,)} | fields))  # type: ignore[arg-type]
        assert caught.value.param == "logprob_token_ids"
