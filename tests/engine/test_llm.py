"""Offline generation under a constraint, on weights that know nothing of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
import torch

from remora.configs.errors import InvalidRequest
from remora.engine.llm import LLM, Constraint, ConstraintKind, SamplingParams
from remora.engine.types import FinishReason
from tests.conftest import TinyCheckpoints

PROMPTS = ["Hello", "One, two", "Zebra"]
WHEN = Constraint(kind=ConstraintKind.REGEX, source="(?:19|20)[0-9]{2}-[01][0-9]")
MANY = SamplingParams(max_tokens=30, temperature=1.5, seed=7, n=2)


@pytest.fixture(scope="module")
def llm(tiny_checkpoints: TinyCheckpoints) -> Iterator[LLM]:
    llm = LLM(str(tiny_checkpoints("llama")), kv_tokens=4096, show_progress=False, num_threads=2)
    yield llm
    llm.close()


def test_every_output_matches_the_constraint_as_a_whole(llm: LLM) -> None:
    answers = llm.generate(PROMPTS, MANY, constraint=WHEN)

    texts = [completion.text for answer in answers for completion in answer.completions]
    reasons = {c.finish_reason for answer in answers for c in answer.completions}
    assert len(texts) == 6
    assert len(set(texts)) > 3
    assert all(len(text) == 7 and text[:2] in ("19", "20") and text[4] == "-" for text in texts)
    assert reasons == {FinishReason.STOP}


def test_a_schema_holds_too(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    constraint = Constraint(
        kind=ConstraintKind.JSON_SCHEMA, source=json.dumps(schema | {"additionalProperties": False})
    )

    (answer,) = llm.generate("Hello", SamplingParams(max_tokens=200, seed=3), constraint=constraint)

    assert answer.finish_reason is FinishReason.STOP
    assert json.loads(answer.text)["ok"] in (True, False)


def test_outputs_without_a_constraint_are_as_they_were(llm: LLM) -> None:
    before = [answer.token_ids for answer in llm.generate(PROMPTS, MANY)]
    llm.generate(PROMPTS, MANY, constraint=WHEN)

    assert [answer.token_ids for answer in llm.generate(PROMPTS, MANY)] == before


def test_a_constraint_that_cannot_be_held_to_is_refused_before_anything_runs(llm: LLM) -> None:
    steps = llm.stats().steps_total

    with pytest.raises(InvalidRequest, match="constraint"):
        llm.generate("Hello", constraint=Constraint(kind=ConstraintKind.REGEX, source="(a"))

    assert llm.stats().steps_total == steps


def test_a_closed_llm_raises(tiny_checkpoints: TinyCheckpoints) -> None:
    llm = LLM(str(tiny_checkpoints("llama")), kv_tokens=1024, show_progress=False)

    llm.close()

    with pytest.raises(RuntimeError, match="has been closed"):
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))


async def test_constraints_compile_where_an_event_loop_is_running(llm: LLM) -> None:
    await asyncio.sleep(0)

    (answer,) = llm.generate("Hello", SamplingParams(max_tokens=30), constraint=WHEN)

    assert answer.finish_reason is FinishReason.STOP


def test_torch_has_the_threads_of_before_when_it_is_closed(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with LLM(str(tiny_checkpoints("llama")), kv_tokens=256, show_progress=False, num_threads=2):
            assert torch.get_num_threads() != 3
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
