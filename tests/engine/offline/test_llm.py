"""LLM as scripts for vLLM use it, without Ray; `tests/engine/test_llm.py` has constraints."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from remora import LLM, RemoraError, SamplingParams
from remora.configs.errors import ConfigError, EngineError, InvalidRequest
from remora.engine.offline import ranks
from remora.engine.offline.options import config_of
from remora.engine.offline.prompts import Prompt
from tests.conftest import TinyCheckpoints
from tests.tiny_embedders import make_tiny_embedding_gemma

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_tokens": 1024, "num_threads": 1}
HELLO = [{"role": "user", "content": "Hello"}]
BYE = [{"role": "user", "content": "Good bye"}, {"role": "assistant", "content": "One"}]

# Imports of Ray fail, as where it is not installed.
SCRIPT = """
import sys
sys.modules["ray"] = None
from remora import LLM, SamplingParams
with LLM(sys.argv[1], dtype="float32", kv_tokens=256, num_threads=1) as llm:
    (answer,) = llm.generate("Hello", SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
print(answer.outputs[0].token_ids)
"""


@pytest.fixture(scope="module")
def llm(tiny_checkpoints: TinyCheckpoints) -> Iterator[LLM]:
    with LLM(str(tiny_checkpoints("llama")), show_progress=False, **OPTIONS) as llm:
        yield llm


def test_results_have_the_fields_of_vllm(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, temperature=1.0, seed=1, n=2, logprobs=1, ignore_eos=True)
    prompts: list[Prompt] = ["Hello", {"prompt": "One, two"}, {"prompt_token_ids": [5, 6, 7]}]

    found = llm.generate(prompts, sampling_params=params, use_tqdm=False)

    assert [each.prompt for each in found] == ["Hello", "One, two", None]
    assert found[2].prompt_token_ids == [5, 6, 7]
    assert len({each.request_id for each in found}) == 3
    for each in found:
        assert each.finished
        assert [output.index for output in each.outputs] == [0, 1]
        for output in each.outputs:
            assert len(output.token_ids) == 3
            assert output.finish_reason == "length"
            assert output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)
            assert output.logprobs is not None
            assert output.cumulative_logprob == sum(line.logprob for line in output.logprobs)


def test_conversations_are_answered_one_by_one_or_together(llm: LLM) -> None:
    (one,) = llm.chat(HELLO, GREEDY)
    both = llm.chat([HELLO, BYE], sampling_params=[GREEDY, GREEDY], use_tqdm=False)

    assert [each.token_ids for each in both] == [one.token_ids, llm.chat(BYE, GREEDY)[0].token_ids]
    assert one.prompt == llm.tokenizer.render_chat(HELLO)
    (left_open,) = llm.chat(BYE, GREEDY, continue_final_message=True)
    assert left_open.prompt is not None
    assert left_open.prompt.rstrip().endswith("One")


def test_the_tokenizer_of_transformers_agrees(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()

    assert tokenizer.encode("Hello, world") == llm.tokenizer.encode(
        "Hello, world", add_special_tokens=True
    )
    rendered = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert rendered == llm.tokenizer.render_chat(HELLO)


def test_wrong_calls_are_refused_before_anything_runs(llm: LLM) -> None:
    steps = llm.stats().steps_total

    with pytest.raises(RemoraError, match="give one"):
        llm.generate("Hello", GREEDY, sampling_params=GREEDY)
    with pytest.raises(InvalidRequest, match="messages is empty"):
        llm.chat([])
    with pytest.raises(InvalidRequest, match="embedding model"):
        llm.embed("Hello")
    assert llm.stats().steps_total == steps


def test_an_embedding_model_embeds_what_a_tokenizer_would_give(tmp_path: Path) -> None:
    make_tiny_embedding_gemma(tmp_path)
    with LLM(str(tmp_path), num_threads=1, dtype="float32", show_progress=False) as llm:
        prompts: list[Prompt] = ["Paris", {"prompt": "Rome, Italy"}]
        text, again = llm.embed(prompts)
        (by_ids,) = llm.embed({"prompt_token_ids": text.prompt_token_ids})
        with pytest.raises(InvalidRequest, match="use embed"):
            llm.generate("Paris")

    assert (text.prompt, again.prompt, by_ids.prompt) == ("Paris", "Rome, Italy", None)
    assert text.outputs.embedding == text.vector.tolist()
    np.testing.assert_allclose(by_ids.vector, text.vector, atol=1e-5)
    assert not np.allclose(again.vector, text.vector, atol=1e-3)


def test_ranks_are_processes_that_end_with_it(llm: LLM, tiny_checkpoints: TinyCheckpoints) -> None:
    prompts = ["Hello", "One, two"]
    with LLM(
        str(tiny_checkpoints("llama")), tensor_parallel_size=2, show_progress=False, **OPTIONS
    ) as divided:
        found = divided.generate(prompts, GREEDY)
        team = divided._generator._team if divided._generator is not None else None
        assert isinstance(team, ranks.ProcessTeam)
        (rank,) = team._ranks
        assert rank._process.poll() is None

    assert [each.token_ids for each in found] == [
        each.token_ids for each in llm.generate(prompts, GREEDY)
    ]
    assert rank._process.poll() == 0


def test_a_rank_that_does_not_start_is_named(
    tiny_checkpoints: TinyCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "COMMAND", (sys.executable, "-c", "raise SystemExit(7)"))

    with pytest.raises(EngineError, match="Rank 1 ended with code 7 before it was ready"):
        LLM(str(tiny_checkpoints("llama")), tensor_parallel_size=2, show_progress=False, **OPTIONS)


def test_a_rank_that_has_joined_and_is_never_ready_is_named(
    tiny_checkpoints: TinyCheckpoints,
) -> None:
    parallel = {"tp_size": 2, "join_timeout_s": 0.1}
    team = ranks.team_of(config_of(str(tiny_checkpoints("llama")), {"parallel": parallel}))
    assert isinstance(team, ranks.ProcessTeam)
    team._ranks.append(SimpleNamespace(answered=threading.Event()))  # type: ignore[arg-type]

    with pytest.raises(EngineError, match=r"Rank 1 was not ready within 0\.1 s"):
        team.ready()


def test_ranks_on_several_machines_are_refused(tiny_checkpoints: TinyCheckpoints) -> None:
    parallel = {"tp_size": 2, "num_nodes": 2}

    with pytest.raises(ConfigError, match="on this machine"):
        LLM(str(tiny_checkpoints("llama")), parallel=parallel, **OPTIONS)


def test_a_script_runs_where_ray_is_not_installed(
    llm: LLM, tiny_checkpoints: TinyCheckpoints, tmp_path: Path
) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(p) for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_checkpoints("llama"))],
        capture_output=True, text=True, cwd=tmp_path, env=env,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    (expected,) = llm.generate("Hello", GREEDY)
    assert done.stdout.splitlines()[-1] == str(expected.token_ids)
